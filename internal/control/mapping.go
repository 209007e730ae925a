package control

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Checked is what the agents have made of a mapping, and the configuration for which
// they did: under another one it says nothing.
type Checked struct {
	Made    *row.Mapping // nil for a mapping that says nothing
	From    string       // the side that is captured
	Version int          // of the mapping before
}

// stillHolds is a Conflict when a table's configuration is another than a mapping was
// checked for. An empty mapping need not have been checked.
func (c *Checked) stillHolds(t *backfill.Table, m *backfill.Mapping) error {
	if c == nil && m.Empty() {
		return nil
	}
	if c == nil || c.Version != t.Version || !m.Empty() && (len(t.CapturedFrom) != 1 || c.From != t.CapturedFrom[0]) {
		return backfill.Errorf(backfill.Conflict, "%s was configured otherwise while its mapping was checked: look at what it has now, and set the mapping again", t.Name)
	}
	return nil
}

// MappingTrial is a mapping that is checked against both sides. Each side's agent does
// its part: first the source's tells what its table looks like, then the receiver's
// makes of the mapping what is used, and at last the source's looks at that.
type MappingTrial struct {
	ID               int64
	Site             string
	Source, Receiver string // the sides
	From, To         string // and their tables
	Mapping          backfill.Mapping
	Sample           int // how many rows it is tried on
	Layout           *row.Layout
	Rows             json.RawMessage // of the source as [][]*string, then as the receiver's agent writes them
	Made             *row.Mapping
	Fields           []backfill.FieldError // what is wrong with it; nil until that is known
	Agreed           bool
}

// Done reports whether all is known.
func (t *MappingTrial) Done() bool { return len(t.Fields) > 0 || t.Agreed }

// StartTrial asks both agents about a mapping.
//
// That rows of the source are shown to somebody is in the audit: they may be of a table
// that is not configured.
func (s *Store) StartTrial(ctx context.Context, by string, t MappingTrial) (id int64, err error) {
	err = s.in(ctx, func(tx pgx.Tx) error {
		if t.Sample > 0 {
			if err := audit(ctx, tx, by, "mapping.try", t.Site, t.From, map[string]any{"from": t.Source, "target": t.To, "rows": t.Sample, "mapping": t.Mapping}); err != nil {
				return err
			}
		}
		if err := tx.QueryRow(ctx, `
			INSERT INTO backfill_control.mapping_trial (site, source_side, receiver_side, source, target, mapping, sample)
			VALUES ($1, $2, $3, $4, $5, $6, $7) RETURNING id`, t.Site, t.Source, t.Receiver, t.From, t.To, t.Mapping, t.Sample).Scan(&id); err != nil {
			return err
		}
		return notifyID(ctx, tx, "mapping", id)
	})
	return id, err
}

const trialColumns = `id, site, source_side, receiver_side, source, target, mapping, sample, layout, rows, made, fields, agreed`

func scanTrial(r pgx.CollectableRow) (t MappingTrial, err error) {
	return t, r.Scan(&t.ID, &t.Site, &t.Source, &t.Receiver, &t.From, &t.To, &t.Mapping, &t.Sample, &t.Layout, &t.Rows, &t.Made, &t.Fields, &t.Agreed)
}

// Trial returns a trial, or NotFound.
func (s *Store) Trial(ctx context.Context, id int64) (*MappingTrial, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+trialColumns+` FROM backfill_control.mapping_trial WHERE id = $1`, id)
	if err != nil {
		return nil, err
	}
	t, err := pgx.CollectExactlyOneRow(rows, scanTrial)
	return &t, one(err, "trial %d of a mapping", id)
}

// Trials lists the trials in which it is a side's turn.
func (s *Store) Trials(ctx context.Context, site, side string) ([]MappingTrial, error) {
	rows, err := s.pool.Query(ctx, `SELECT `+trialColumns+` FROM backfill_control.mapping_trial
		 WHERE site = $1 AND coalesce(nullif(fields, 'null'), '[]') = '[]'
		   AND CASE WHEN layout IS NULL OR made IS NOT NULL THEN source_side = $2 AND NOT agreed ELSE receiver_side = $2 END ORDER BY id`, site, side)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, scanTrial)
}

// PutTrial stores what an agent has found.
func (s *Store) PutTrial(ctx context.Context, t MappingTrial) error {
	return s.in(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `UPDATE backfill_control.mapping_trial SET layout = $2, rows = $3, made = $4, fields = $5, agreed = $6 WHERE id = $1`,
			t.ID, t.Layout, t.Rows, t.Made, t.Fields, t.Agreed); err != nil {
			return err
		}
		return notifyID(ctx, tx, "mapping", t.ID)
	})
}

// EndTrial forgets a trial, and the rows it was made on.
func (s *Store) EndTrial(ctx context.Context, id int64) error {
	_, err := s.pool.Exec(ctx, `DELETE FROM backfill_control.mapping_trial WHERE id = $1`, id)
	return err
}

// EndOldTrials forgets the trials that nobody waits for any more, as whoever asked was
// killed: rows of the source are in them.
func (s *Store) EndOldTrials(ctx context.Context) error {
	_, err := s.pool.Exec(ctx, `DELETE FROM backfill_control.mapping_trial WHERE asked_at < clock_timestamp() - interval '2 min'`)
	return err
}

// putMapping sets or, with an empty one, removes a table's mapping. What was made or
// compared under the one before counts no longer: open requests and reconciliations
// end, and another backfill is offered.
func (s *Store) putMapping(ctx context.Context, tx pgx.Tx, t *backfill.Table, m *backfill.Mapping, c *Checked) error {
	var made *row.Mapping
	if c != nil {
		made = c.Made
	}
	if len(t.CapturedFrom) != 1 && !m.Empty() {
		return invalidMapping("a table with a mapping is captured from one side: set captured_from to that")
	}
	if m.Empty() {
		m, made = nil, nil
	}
	var same bool
	if err := tx.QueryRow(ctx, `SELECT (mapping, made) IS NOT DISTINCT FROM ($2::jsonb, $3::jsonb) FROM backfill_control.table_config WHERE id = $1`, t.ID, m, made).Scan(&same); err != nil || same {
		return err
	}
	// Who pushes, releases or applies now does so by the one before.
	var version int
	if err := tx.QueryRow(ctx, `
		UPDATE backfill_control.table_config SET mapping = $2, made = $3, mapping_version = mapping_version + 1 WHERE id = $1 RETURNING mapping_version`, t.ID, m, made).Scan(&version); err != nil {
		return err
	}
	if version == 1 {
		// Nothing of the table was sent under another one, if it is new.
		var counted bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM backfill_control.table_side WHERE table_id = $1 AND layout_id IS NOT NULL)`, t.ID).Scan(&counted); err != nil || !counted {
			return err
		}
	}
	why := backfill.Remapped(version)
	if err := fail(ctx, tx, why, `table_id = $1`, t.ID); err != nil {
		return err
	}
	if err := s.endRuns(ctx, tx, t.Site, t.ID, why); err != nil {
		return err
	}
	for _, sql := range []string{
		`DELETE FROM backfill_control.shadow_read WHERE table_id = $1`,
		`UPDATE backfill_control.cutover SET soak_since = clock_timestamp() WHERE table_id = $1`,
	} {
		if _, err := tx.Exec(ctx, sql, t.ID); err != nil {
			return err
		}
	}
	// Those of whole comparisons count until the next; what reads have found has no such end.
	if _, err := tx.Exec(ctx, `
		UPDATE backfill_control.difference f SET state = 'waived', decided_by = 'backfill', note = $2
		  FROM backfill_control.reconciliation r WHERE r.id = f.run_id AND r.table_id = $1 AND r.mode = 'shadow' AND f.state = 'open'`,
		t.ID, "found under the mapping before"); err != nil {
		return err
	}
	for _, from := range t.CapturedFrom {
		if err := gap(ctx, tx, t.ID, from, why, 0); err != nil {
			return err
		}
	}
	return nil
}

// end is one end of a table's way: a table on a side.
type end struct{ side, relation string }

// ends are what a table is captured from and what it is written to. In one database the
// sides are one.
func ends(t *backfill.Table, sides []Side, oneDatabase bool) (captured, written []end) {
	for _, from := range t.CapturedFrom {
		for _, s := range sides {
			e := end{s.Name, t.Relation(s.Name)}
			if oneDatabase {
				e.side = ""
			}
			if s.Name == from {
				captured = append(captured, e)
			} else {
				written = append(written, e)
			}
		}
	}
	return captured, written
}

// meets is Refused when a table is written to where another table of the site is written
// to as well, as a truncate of one would empty it for both, and keys could meet; or when
// one is captured from where the other is written to: what is applied there is not
// captured again, so that its changes would be lost on the way.
func meets(ctx context.Context, tx pgx.Tx, st *Site, t *backfill.Table) error {
	all, err := tablesIn(ctx, tx, st.Name)
	if err != nil {
		return err
	}
	field := "captured_from"
	if t.Mapping != nil {
		field = "mapping"
	}
	refuse := func(message string) error {
		return &backfill.Error{Code: backfill.Refused, Message: message, Fields: []backfill.FieldError{{Field: field, Message: message}}}
	}
	const otherwise = "what is applied there is not captured again, and its changes would be lost; capture both from where they are made, or configure the second step in another site"
	captured, written := ends(t, st.Sides, st.OneDatabase)
	for _, o := range all {
		if o.ID == t.ID {
			continue
		}
		from, to := ends(&o, st.Sides, st.OneDatabase)
		for _, e := range written {
			if slices.Contains(to, e) {
				return refuse(fmt.Sprintf("%s is written to %s already: a table takes the rows of one", o.Name, e.relation))
			}
			if slices.Contains(from, e) {
				return refuse(fmt.Sprintf("%s would be written to %s, from which %s is captured: %s", t.Name, e.relation, o.Name, otherwise))
			}
		}
		for _, e := range captured {
			if slices.Contains(to, e) {
				return refuse(fmt.Sprintf("%s would be captured from %s, to which %s is written: %s", t.Name, e.relation, o.Name, otherwise))
			}
		}
	}
	return nil
}

func invalidMapping(message string) error {
	return backfill.Unfit([]backfill.FieldError{{Field: "mapping", Message: message}})
}

// mappingStays is Invalid when a table's mapping would be used the other way round.
func mappingStays(before, now *backfill.Table, changed bool) error {
	if changed || now.Mapping == nil || slices.Equal(before.CapturedFrom, now.CapturedFrom) {
		return nil
	}
	return invalidMapping("it makes rows of " + before.CapturedFrom[0] + ": set another with captured_from, or an empty one")
}
