package control

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/proof"
)

// PolicyChange is what a change of a cutover policy changes; nil fields stay as they are.
type PolicyChange struct {
	Objective *float64
	Soak      *time.Duration
	ProofAge  *time.Duration
	MaxLag    *time.Duration
	Sample    *int
}

// PutPolicy changes what has to hold before the reads of a table move.
func (s *Store) PutPolicy(ctx context.Context, by string, d backfill.Direction, t *backfill.Table, c PolicyChange) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO backfill_control.cutover (direction, table_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`, d.ID, t.ID); err != nil {
			return err
		}
		before, err := standing(ctx, tx, `SELECT objective, soak::text AS soak, proof_age::text AS proof_age, max_lag::text AS max_lag, sample
			  FROM backfill_control.cutover WHERE direction = $1 AND table_id = $2 FOR UPDATE`, d.ID, t.ID)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `
			UPDATE backfill_control.cutover SET objective = coalesce($3, objective), soak = coalesce($4, soak), proof_age = coalesce($5, proof_age), max_lag = coalesce($6, max_lag),
			       sample = coalesce($7, sample), set_by = $8 WHERE direction = $1 AND table_id = $2`, d.ID, t.ID, c.Objective, c.Soak, c.ProofAge, c.MaxLag, c.Sample, by); err != nil {
			return err
		}
		detail := map[string]any{"from": d.From, "before": before}
		for name, v := range map[string]*time.Duration{"soak": c.Soak, "proof_age": c.ProofAge, "max_lag": c.MaxLag} {
			if v != nil {
				detail[name] = v.String()
			}
		}
		if c.Objective != nil {
			detail["objective"] = *c.Objective
		}
		if c.Sample != nil {
			detail["sample"] = *c.Sample
		}
		if err := audit(ctx, tx, by, "cutover.policy", d.Site, t.Name, detail); err != nil {
			return err
		}
		if err := notifyID(ctx, tx, "shadow", int64(d.ID)); err != nil {
			return err
		}
		return notify(ctx, tx, "site", d.Site)
	})
}

// Sampled is a table whose reads the source's agent samples.
type Sampled struct {
	TableID int32
	Name    string // on the source
	Reads   int    // a minute
	Rows    int64  // of the table, about
}

// SampledTables lists the tables of a direction whose reads are sampled.
func (s *Store) SampledTables(ctx context.Context, direction int32) ([]Sampled, error) {
	return list[Sampled](ctx, s, `
		SELECT t.id, coalesce(t.mapping ->> 'source', t.name), p.sample, coalesce(n.row_count, 0) FROM backfill_control.cutover p JOIN backfill_control.table_config t ON t.id = p.table_id AND t.active AND t.removed_at IS NULL
		  JOIN backfill_control.direction d ON d.id = p.direction JOIN backfill_control.table_side n ON n.table_id = t.id AND n.side = d.from_side
		 WHERE p.direction = $1 AND p.sample > 0 ORDER BY t.id`, direction)
}

// ReportSequences stores the sequences behind the columns of tables, by their ids, as a
// side's agent has just seen them. That they are as before is stored once a minute.
func (s *Store) ReportSequences(ctx context.Context, side string, seen map[int32][]backfill.Sequence) error {
	ids, texts := []int32{}, []string{}
	for id, all := range seen {
		text, err := json.Marshal(all)
		if err != nil {
			return err
		}
		ids, texts = append(ids, id), append(texts, string(text))
	}
	_, err := s.pool.Exec(ctx, `
		WITH r AS MATERIALIZED (SELECT id AS table_id, seen::jsonb AS seen FROM unnest($2::int[], $3::text[]) r (id, seen)),
		free AS MATERIALIZED (
		    SELECT s.table_id FROM backfill_control.table_side s JOIN r USING (table_id)
		     WHERE s.side = $1 AND (s.sequences IS DISTINCT FROM r.seen OR s.sequences_at IS NULL OR s.sequences_at < clock_timestamp() - interval '1 min')`+skipBusy+`)
		UPDATE backfill_control.table_side s SET sequences = r.seen, sequences_at = clock_timestamp()
		  FROM r JOIN free USING (table_id) WHERE s.table_id = r.table_id AND s.side = $1`, side, ids, texts)
	return err
}

// Cutover reads everything that the answer to "may the reads of this table move?" is
// drawn from.
func (s *Store) Cutover(ctx context.Context, site, table, from string) (*backfill.Cutover, error) {
	p, err := s.Panel(ctx, site, table, from)
	if err != nil {
		return nil, err
	}
	c := &backfill.Cutover{Panel: *p, Source: backfill.SideSeen{Name: p.Direction.From}, Receiver: backfill.SideSeen{Name: p.Direction.To}}
	d, t := p.Direction.ID, p.Table.ID
	last, err := s.lastRequest(ctx, d, t)
	if err != nil {
		return nil, err
	}
	c.Backfill = last
	runs, err := s.query(ctx, `WHERE r.direction = $1 AND r.table_id = $2 AND r.mode = 'full' AND r.state = 'FINISHED' ORDER BY r.id DESC LIMIT 1`, d, t)
	if err != nil {
		return nil, err
	}
	var proofID int64
	var since *time.Time
	if len(runs) > 0 {
		c.Proof, proofID, since = runs[0], runs[0].ID, runs[0].StartedAt
	}
	if err := s.pool.QueryRow(ctx, `
		SELECT clock_timestamp(), a.gap_last,
		       greatest((SELECT max(r.closed_at) FROM backfill_control.reconciliation r WHERE r.direction = $1 AND r.table_id = $2 AND r.touched),
		                (SELECT max(q.closed_at) FROM backfill_control.request q WHERE q.direction = $1 AND q.table_id = $2 AND q.released > 0)),
		       EXISTS (SELECT FROM backfill_control.reconciliation r WHERE r.direction = $1 AND r.table_id = $2 AND r.mode = 'repair' AND r.state IN ('PENDING', 'RUNNING'))
		       OR EXISTS (SELECT FROM backfill_control.request q WHERE q.direction = $1 AND q.table_id = $2 AND q.state = 'RELEASING'),
		       -- Keys found since the proof began, by whatever run; what a shadow read found, a
		       -- reconciliation may be unable to see.
		       (SELECT count(*) FROM backfill_control.difference f JOIN backfill_control.reconciliation r ON r.id = f.run_id
		         WHERE r.direction = $1 AND r.table_id = $2 AND r.parent IS NULL AND (r.mode = 'shadow' OR r.id >= $3) AND f.settled AND f.state = 'open'),
		       (SELECT count(*) FROM backfill_control.quarantine q WHERE q.direction = $1 AND q.table_id = $2 AND q.state = 'skipped' AND q.since >= coalesce($4::timestamptz, '-infinity')),
		       $4::timestamptz IS NOT NULL AND EXISTS (SELECT FROM backfill_control.entry e WHERE e.direction = $1 AND e.table_id = $2 AND e.dropped AND e.created_at >= $4)
		  FROM backfill_control.direction d LEFT JOIN backfill_control.table_side a ON a.table_id = $2 AND a.side = d.from_side WHERE d.id = $1`, d, t, proofID, since).
		Scan(&c.Now, &c.GapLast, &c.Repaired, &c.Repairing, &c.Open, &c.Skipped, &c.Dropped); err != nil {
		return nil, err
	}
	if c.Waived, err = list[backfill.Waived](ctx, s, `
		SELECT f.decided_by, f.note, count(*) FROM backfill_control.difference f JOIN backfill_control.reconciliation r ON r.id = f.run_id
		 WHERE r.direction = $1 AND r.table_id = $2 AND r.parent IS NULL AND (r.mode = 'shadow' OR r.id >= $3) AND f.state = 'waived' GROUP BY 1, 2 ORDER BY 1, 2`, d, t, proofID); err != nil {
		return nil, err
	}
	for _, side := range []*backfill.SideSeen{&c.Source, &c.Receiver} {
		var sequences []byte
		if err := s.pool.QueryRow(ctx, `
			SELECT n.agent_seen_at, coalesce(n.halted, n.problem, ''), n.outbox_at, coalesce(x.shape, ''), x.sequences, x.sequences_at
			  FROM backfill_control.side n LEFT JOIN backfill_control.table_side x ON x.side = n.name AND x.table_id = $3 WHERE n.site = $1 AND n.name = $2`, p.Direction.Site, side.Name, t).
			Scan(&side.SeenAt, &side.Problem, &side.OutboxAt, &side.Shape, &sequences, &side.SequencesAt); err != nil {
			return nil, one(err, "side %q", side.Name)
		}
		if sequences != nil {
			if err := json.Unmarshal(sequences, &side.Sequences); err != nil {
				return nil, err
			}
		}
	}
	return c, s.soak(ctx, c)
}

func (s *Store) lastRequest(ctx context.Context, direction, table int32) (*backfill.Request, error) {
	var id int64
	err := s.pool.QueryRow(ctx, `SELECT id FROM backfill_control.request WHERE direction = $1 AND table_id = $2 AND key IS NULL ORDER BY id DESC LIMIT 1`, direction, table).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return s.Request(ctx, id)
}

// soak reads the policy and how the shadow reads stand.
func (s *Store) soak(ctx context.Context, c *backfill.Cutover) error {
	p, k := &c.Policy, &c.Soak
	d, t := c.Panel.Direction.ID, c.Panel.Table.ID
	var began *time.Time
	err := s.pool.QueryRow(ctx, `
		SELECT coalesce(p.objective, 0.0001), coalesce(p.soak, '24 h'), coalesce(p.proof_age, '24 h'), coalesce(p.max_lag, '30 s'), coalesce(p.sample, 0), coalesce(p.set_by, ''),
		       (SELECT min(at) FROM backfill_control.shadow_count x WHERE x.direction = p.direction AND x.table_id = p.table_id AND x.at >= p.soak_since),
		       (SELECT min(reported_at) FROM backfill_control.shadow_read r WHERE r.direction = $1 AND r.table_id = $2 AND r.verdict IS NULL)
		  FROM (SELECT) one LEFT JOIN backfill_control.cutover p ON p.direction = $1 AND p.table_id = $2`, d, t).
		Scan(&p.Objective, &p.Soak, &p.ProofAge, &p.MaxLag, &p.Sample, &p.SetBy, &began, &k.Oldest)
	if err != nil || began == nil {
		return err
	}
	k.Began, k.Since = began, *began
	if from := c.Now.Add(-p.Soak); from.After(k.Since) {
		k.Since = from
	}
	// A minute is within the window when any of it is.
	if err := s.pool.QueryRow(ctx, `
		WITH x AS (SELECT * FROM backfill_control.shadow_count WHERE direction = $1 AND table_id = $2 AND at >= $3 AND at > $4::timestamptz - interval '1 minute'),
		told AS (SELECT at FROM x WHERE match + mismatch > 0 UNION ALL SELECT $4 UNION ALL SELECT $5)
		SELECT coalesce(sum(match), 0)::bigint, coalesce(sum(stale), 0)::bigint, coalesce(sum(mismatch), 0)::bigint, coalesce(sum("unknown"), 0)::bigint,
		       (SELECT max(next - at) FROM (SELECT at, lead(at) OVER (ORDER BY at) AS next FROM told) g) FROM x`, d, t, *began, k.Since, c.Now).
		Scan(&k.Match, &k.Stale, &k.Mismatch, &k.Unknown, &k.Silence); err != nil {
		return err
	}
	k.Bound = proof.Bound(k.Mismatch+k.Unknown, k.Match+k.Mismatch+k.Unknown)
	return nil
}

// ShadowPoint counts the reads of a stretch of time.
type ShadowPoint struct {
	At time.Time
	backfill.ShadowCounts
}

// ShadowCourse counts the reads of a table since a time in stretches of a length.
func (s *Store) ShadowCourse(ctx context.Context, d backfill.Direction, table int32, since time.Time, step time.Duration) ([]ShadowPoint, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT date_bin($4::interval, at, 'epoch') AS stretch, sum(match)::bigint, sum(stale)::bigint, sum(mismatch)::bigint, sum("unknown")::bigint
		  FROM backfill_control.shadow_count WHERE direction = $1 AND table_id = $2 AND at >= $3 GROUP BY 1 ORDER BY 1`, d.ID, table, since, step)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (p ShadowPoint, err error) {
		return p, row.Scan(&p.At, &p.Match, &p.Stale, &p.Mismatch, &p.Unknown)
	})
}

// OddRead is a read that mismatched, or could not be judged.
type OddRead struct {
	N       int64
	At      time.Time
	Sampled bool
	Key     backfill.Key
	Verdict string
	Problem string
	Run     *int64 // that has its key, when it mismatched
}

// OddReads are the last reads of a table that mismatched, or could not be judged.
func (s *Store) OddReads(ctx context.Context, d backfill.Direction, table int32, limit int) ([]OddRead, error) {
	return list[OddRead](ctx, s, `
		SELECT n, reported_at, sampled, key, verdict, problem, CASE WHEN verdict = 'mismatch' THEN run_id END FROM backfill_control.shadow_read
		 WHERE direction = $1 AND table_id = $2 AND verdict IS NOT NULL ORDER BY n DESC LIMIT $3`, d.ID, table, limit)
}

// Answered puts the answer to "may the reads move?" on record, once for each who asks
// until it is another.
func (s *Store) Answered(ctx context.Context, by string, c *backfill.Cutover) error {
	var failed []string
	for _, u := range backfill.Unmet(c.Clauses()) {
		failed = append(failed, u.Name)
	}
	answer := "yes"
	if failed != nil {
		answer = "no: " + strings.Join(failed, ", ")
	}
	return s.in(ctx, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			INSERT INTO backfill_control.cutover AS p (direction, table_id, answer, answered_to) VALUES ($1, $2, $3, ARRAY[$4])
			ON CONFLICT (direction, table_id) DO UPDATE
			SET answer = excluded.answer, answered_to = CASE WHEN p.answer = excluded.answer THEN p.answered_to || excluded.answered_to ELSE excluded.answered_to END
			 WHERE p.answer IS DISTINCT FROM excluded.answer OR NOT p.answered_to @> excluded.answered_to`, c.Panel.Direction.ID, c.Panel.Table.ID, answer, by)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		detail := map[string]any{"from": c.Panel.Direction.From, "read_new": failed == nil}
		for _, k := range c.Clauses() {
			if slices.Contains(failed, k.Name) {
				detail[k.Name] = k.Message
			}
		}
		return audit(ctx, tx, by, "cutover.answer", c.Panel.Direction.Site, c.Panel.Table.Name, detail)
	})
}

// ShadowFigure is how the shadow reads of a table stand, for monitoring.
type ShadowFigure struct {
	Site, Table, From string
	Rate, Bound       float64 // over the soak so far
	Objective         float64
	Known             int64 // reads that tell something, or could not be judged
	Mismatches        int64 // ever
	// ProofAge is how old the last proof may be, 0 while nobody has set what the
	// table's cutover needs.
	ProofAge time.Duration
}

// ShadowFigures tells how the shadow reads of all tables stand.
func (s *Store) ShadowFigures(ctx context.Context) ([]ShadowFigure, error) {
	rows, err := s.pool.Query(ctx, `
		SELECT d.site, t.name, d.from_side, p.objective, p.mismatches, CASE WHEN p.set_by <> '' THEN p.proof_age ELSE '0' END, coalesce(x.match, 0), coalesce(x.mismatch, 0), coalesce(x.unknown, 0)
		  FROM backfill_control.cutover p JOIN backfill_control.direction d ON d.id = p.direction JOIN backfill_control.table_config t ON t.id = p.table_id AND t.removed_at IS NULL,
		       LATERAL (SELECT sum(match)::bigint AS match, sum(mismatch)::bigint AS mismatch, sum("unknown")::bigint AS unknown FROM backfill_control.shadow_count x
		                 WHERE x.direction = p.direction AND x.table_id = p.table_id AND x.at >= p.soak_since AND x.at > clock_timestamp() - p.soak - interval '1 minute') x ORDER BY 1, 2, 3`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (f ShadowFigure, err error) {
		var n backfill.ShadowCounts
		err = row.Scan(&f.Site, &f.Table, &f.From, &f.Objective, &f.Mismatches, &f.ProofAge, &n.Match, &n.Mismatch, &n.Unknown)
		f.Rate, f.Known = n.Rate(), n.Match+n.Mismatch+n.Unknown
		f.Bound = proof.Bound(n.Mismatch+n.Unknown, f.Known)
		return f, err
	})
}
