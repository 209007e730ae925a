package activities

import (
	"context"
	"errors"
	"slices"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
)

// Shadow does this side's part of judging shadow reads, turn after turn: it samples
// reads of the tables that are to be sampled, compares the keys that were read, those
// sent from here and those sent to here, as a reconciliation compares them, and tells
// where the sequences stand.
func (a *Agent) Shadow(ctx context.Context) error {
	rung, done := a.bell("shadow")
	defer done()
	s := &shadowing{Agent: a, parts: map[int64]judging{}}
	return a.turns(ctx, rung, s.pause, func() (bool, error) { return s.step(ctx) })
}

const (
	sampleReadsEvery = 10 * time.Second
	sequencesEvery   = 20 * time.Second
	sequencesSeldom  = time.Minute // where looking takes long
	idleShadow       = 2 * time.Second
)

// shadowing remembers between steps what is open.
type shadowing struct {
	*Agent
	parts           map[int64]judging
	sampled, looked time.Time
	lookEvery       time.Duration
}

// judging is this side's part of a run.
type judging func(context.Context, *backfill.Reconciliation) (progress, error)

func (s *shadowing) pause() time.Duration {
	switch {
	case len(s.parts) > 0:
		return 100 * time.Millisecond
	case s.listening.Load():
		return idleApply
	}
	return idleShadow
}

func (s *shadowing) step(ctx context.Context) (busyNow bool, err error) {
	if err := s.ready(ctx); err != nil {
		return false, err
	}
	if time.Since(s.looked) >= s.lookEvery {
		began := time.Now()
		if err := s.lookAtSequences(ctx); err != nil {
			return false, err
		}
		s.looked = time.Now()
		s.lookEvery = min(max(sequencesEvery, 200*time.Since(began)), sequencesSeldom)
	}
	if time.Since(s.sampled) >= sampleReadsEvery {
		if err := s.sample(ctx, sampleReadsEvery); err != nil {
			return false, err
		}
		s.sampled = time.Now()
	}
	if err := s.store.BeginShadow(ctx, s.Out.ID); err != nil {
		return false, err
	}
	runs, err := s.store.ShadowRuns(ctx, s.Out.ID, s.In.ID)
	if err != nil {
		return false, err
	}
	for id := range s.parts {
		if !slices.ContainsFunc(runs, func(r *backfill.Reconciliation) bool { return r.ID == id }) {
			delete(s.parts, id)
		}
	}
	for _, run := range runs {
		did, err := s.judge(ctx, run)
		if err != nil {
			return false, err
		}
		busyNow = busyNow || did == busy
	}
	return busyNow, nil
}

// judge takes one step of a run. What can never be compared ends it; the others go on.
func (s *shadowing) judge(ctx context.Context, run *backfill.Reconciliation) (progress, error) {
	part, ok := s.parts[run.ID]
	if !ok {
		c := comparison{Agent: s.Agent, id: run.ID}
		part = (&comparing{comparison: c}).step
		if run.From == s.Out.From {
			part = (&hashing{c}).step
		}
		s.parts[run.ID] = part
	}
	did, err := part(ctx, run)
	var domain *backfill.Error
	switch {
	case errors.Is(err, control.ErrFenced), errors.Is(err, side.ErrNotThere):
		return idle, nil
	case errors.Is(err, side.ErrLayout), side.Permanent(err), errors.As(err, &domain) && domain.Code == backfill.Invalid:
		_, err := s.store.EndRun(ctx, run.ID, "backfill", backfill.RunFailed, message(err))
		if backfill.CodeOf(err) == backfill.Conflict {
			err = nil
		}
		return idle, err
	case err != nil || did != over || run.From != s.Out.From:
		return did, err
	}
	closed, err := s.store.JudgeReads(ctx, run.ID)
	if closed {
		return busy, err
	}
	return idle, err
}

// readAsServed brings a run's reads to the form in which rows are compared.
func (h *hashing) readAsServed(ctx context.Context, run *backfill.Reconciliation) error {
	reads, err := h.store.ShadowReads(ctx, h.id)
	if err != nil {
		return err
	}
	given := make([]side.Read, len(reads))
	columns := map[int64][]string{}
	for i, r := range reads {
		given[i] = side.Read{N: r.N, Key: r.Key, Values: map[string]*string{}}
		for j, name := range r.Columns {
			given[i].Values[name] = r.Values[j]
		}
		columns[r.N] = r.Columns
	}
	all, err := h.db.Served(ctx, h.compared(run), given)
	if err != nil {
		return err
	}
	served := make([]control.Served, len(all))
	for i, s := range all {
		served[i] = control.Served{N: s.N, Key: s.Key, Row: s.Row, Problem: s.Problem}
		for j, name := range h.rows.Columns {
			if h.given(name, columns[s.N]) {
				served[i].Compared = append(served[i].Compared, j+1)
			}
		}
	}
	return h.store.AddReads(ctx, h.id, served)
}

// given reports whether columns of the source that were served are all that a compared
// column is made of.
func (h *hashing) given(name string, served []string) bool {
	if h.made != nil && len(served) > 0 {
		served = slices.Clone(served)
		for _, key := range h.made.Key {
			served = append(served, h.made.Sources(key)...)
		}
	}
	if len(served) == 0 {
		return false // there was no row
	}
	for _, source := range h.made.Sources(name) {
		if !slices.Contains(served, source) {
			return false
		}
	}
	return true
}

// sample reads as an application would: of each table that is to be sampled as many
// keys as fall to a stretch of time, half of them changed lately, the others random.
func (s *shadowing) sample(ctx context.Context, stretch time.Duration) error {
	tables, err := s.store.SampledTables(ctx, s.Out.ID)
	if err != nil {
		return err
	}
	for _, t := range tables {
		n := max(int(time.Duration(t.Reads)*stretch/time.Minute), 1)
		recent, err := s.store.RecentKeys(ctx, s.Out.ID, t.TableID, n/2)
		if err != nil {
			return err
		}
		layout, rows, err := s.db.Sample(ctx, t.Name, recent, n-len(recent), t.Rows)
		s.trouble("reads of "+t.Name+" cannot be sampled", err)
		if err != nil {
			if errors.Is(err, side.ErrLayout) || side.SQLState(err) != "" {
				continue
			}
			return err
		}
		var reads []control.ShadowRead
		for _, r := range rows {
			read := control.ShadowRead{TableID: t.TableID, Key: r.Key, Found: r.Values != nil, Columns: []string{}, Values: []*string{}}
			for _, c := range layout.Columns {
				if v, ok := r.Values[c.Name]; ok {
					read.Columns, read.Values = append(read.Columns, c.Name), append(read.Values, v)
				}
			}
			reads = append(reads, read)
		}
		if len(reads) == 0 {
			continue
		}
		if _, err := s.store.ReportReads(ctx, s.Out.ID, reads, true); err != nil {
			return err
		}
	}
	return nil
}

// lookAtSequences tells where the sequences behind this side's tables stand.
func (s *shadowing) lookAtSequences(ctx context.Context) error {
	tables, err := s.store.Tables(ctx, s.db.Site)
	if err != nil {
		return err
	}
	seen := map[int32][]backfill.Sequence{}
	for _, t := range tables {
		all, err := s.db.Sequences(ctx, t.Relation(s.db.Side))
		if err != nil {
			if side.SQLState(err) != "" {
				continue // what was told last gets old, and then counts as unknown
			}
			return err
		}
		seen[t.ID] = all
	}
	return s.store.ReportSequences(ctx, s.db.Side, seen)
}
