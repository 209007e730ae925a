package side

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Read is what the old path is said to have served of a key.
type Read struct {
	N      int64
	Key    backfill.Key
	Values map[string]*string // the texts of the columns that were served
}

// Served is a read in the form in which rows are compared.
type Served struct {
	N       int64
	Key     backfill.Key // in the spelling of the row that is there, if it is
	Row     []*string    // nil when PostgreSQL cannot read it, see Problem
	Problem string
}

// Served brings reads to the form in which rows of the source are compared:
// PostgreSQL reads each text as its column's type, and prints it again, so that it
// does not matter how an application spells its values. Columns that were not served
// are NULL. One that cannot be read does not keep the others from it.
func (db *DB) Served(ctx context.Context, c Compared, reads []Read) ([]Served, error) {
	out, err := db.served(ctx, c, reads)
	if state := SQLState(err); !strings.HasPrefix(state, "22") && !strings.HasPrefix(state, "23") {
		return out, err
	}
	if len(reads) == 1 {
		return []Served{{N: reads[0].N, Problem: brief(err)}}, nil
	}
	out = nil
	for _, half := range [][]Read{reads[:len(reads)/2], reads[len(reads)/2:]} {
		some, err := db.Served(ctx, c, half)
		if err != nil {
			return nil, err
		}
		out = append(out, some...)
	}
	return out, nil
}

func (db *DB) served(ctx context.Context, c Compared, reads []Read) (out []Served, err error) {
	parsed, err := backfill.ParseTableName(c.Name)
	if err != nil {
		return nil, err
	}
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		if err := lock(ctx, tx, row.Ident(parsed.Schema, parsed.Name)); err != nil {
			return err
		}
		t, err := describeRelation(ctx, tx, c.Relation)
		if err != nil {
			return err
		}
		if t.Problem != "" {
			return fmt.Errorf("%w: %s", ErrLayout, t.Problem)
		}
		if err := t.unchangedSince(c.Layout, c.Shape, "the reconciliation began"); err != nil {
			return err
		}
		text, err := t.readsAsJSON(reads)
		if err != nil {
			return err
		}
		values := t.Own.ValuesFrom(`r."values"`)
		for i, name := range t.Own.Names() {
			values[i] += " AS " + name
		}
		served := "(SELECT " + strings.Join(values, ", ") + ")"
		if c.Made != nil {
			served = c.Made.OfRow(strings.Join(values, ", "))
		}
		rows, err := tx.Query(ctx, fmt.Sprintf(`
			SELECT r.n, CASE WHEN live.tableoid IS NOT NULL THEN %s ELSE %s END, %s
			  FROM (SELECT (l->>'n')::bigint AS n, ARRAY(SELECT json_array_elements_text(l->'key')) AS key, ARRAY(SELECT json_array_elements_text(l->'values')) AS "values"
			          FROM json_array_elements(%s) l OFFSET 0) r
			 CROSS JOIN LATERAL %s t LEFT JOIN %s live ON %s`,
			t.Layout.KeyText("live"), t.Layout.KeyText("t"), c.Rows, row.Literal(text), served, t.SQL, t.Layout.KeyEquals("live", "r.key")))
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (s Served, err error) { return s, r.Scan(&s.N, &s.Key, &s.Row) })
		return err
	})
	return out, err
}

// readsAsJSON lists reads with their values in the order of the table's columns.
func (t *Table) readsAsJSON(reads []Read) (string, error) {
	type line struct {
		N      int64        `json:"n"`
		Key    backfill.Key `json:"key"`
		Values []*string    `json:"values"`
	}
	lines := make([]line, len(reads))
	for i, r := range reads {
		if len(r.Key) != len(t.Own.Key) {
			return "", backfill.Errorf(backfill.Invalid, "a key of %s has %d values: (%s)", t.Name, len(t.Own.Key), strings.Join(t.Own.Key, ", "))
		}
		lines[i] = line{r.N, r.Key, make([]*string, len(t.Own.Columns))}
		for j, column := range t.Own.Columns {
			lines[i].Values[j] = r.Values[column.Name]
			if k := slices.Index(t.Own.Key, column.Name); k >= 0 {
				lines[i].Values[j] = &r.Key[k]
			}
		}
	}
	text, err := json.Marshal(lines)
	return string(text), err
}

// sampleBytes is how large a row may be, about, to be sampled.
const sampleBytes = 256 << 10

// Sample reads the rows of some keys, and about random others of a table of about
// rows rows, as an application would read them now. Large rows are left out, and keys
// that are not there have no values.
func (db *DB) Sample(ctx context.Context, table string, keys []backfill.Key, random int, rows int64) (l *row.Layout, out []Read, err error) {
	parsed, err := backfill.ParseTableName(table)
	if err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(append([]backfill.Key{}, keys...))
	if err != nil {
		return nil, nil, err
	}
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		if err := lock(ctx, tx, row.Ident(parsed.Schema, parsed.Name)); err != nil {
			return err
		}
		t, err := describe(ctx, tx, table)
		if err != nil {
			return err
		}
		if t.Problem != "" {
			return fmt.Errorf("%w: %s", ErrLayout, t.Problem)
		}
		l = t.Layout
		// Pages are drawn, and of their rows some: fifty times as many rows as are wanted keep
		// those of one page from being all.
		share := 100.0
		if rows > 0 {
			share = min(100, 100*50*float64(random)/float64(rows))
		}
		got, err := tx.Query(ctx, fmt.Sprintf(`
			SELECT k.key, CASE WHEN t.tableoid IS NOT NULL THEN %[1]s END FROM %[2]s k LEFT JOIN %[3]s t ON %[4]s WHERE t.tableoid IS NULL OR %[5]s < %[6]d
			UNION ALL
			SELECT k, r FROM (SELECT %[7]s AS k, %[1]s AS r FROM %[3]s t TABLESAMPLE SYSTEM (%[8]g) WHERE %[5]s < %[6]d ORDER BY random() LIMIT %[9]d) x`,
			l.RowText("t"), listedKeys(string(text)), t.SQL, l.KeyEquals("t", "k.key"), l.Sizes("t"), sampleBytes, l.KeyText("t"), share, random))
		if err != nil {
			return err
		}
		var key backfill.Key
		var values []*string
		_, err = pgx.ForEachRow(got, []any{&key, &values}, func() error {
			r := Read{Key: key}
			if values != nil {
				r.Values = map[string]*string{}
				for i, c := range l.Columns {
					r.Values[c.Name] = values[i]
				}
			}
			out, key, values = append(out, r), nil, nil
			return nil
		})
		return err
	})
	return l, out, err
}

// Sequences reads the sequences behind a table's columns: of identity columns, of
// serial ones, and those that a default names.
func (db *DB) Sequences(ctx context.Context, table string) (out []backfill.Sequence, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		t, err := describe(ctx, tx, table)
		if err != nil || t.OID == 0 {
			return err
		}
		rows, err := tx.Query(ctx, `
			SELECT DISTINCT a.attname, s.oid::regclass::text, q.seqincrement, has_sequence_privilege(s.oid, 'SELECT')
			  FROM pg_attribute a
			  JOIN LATERAL (
			       SELECT d.objid AS seq FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum AND d.deptype IN ('a', 'i')
			       UNION SELECT d.refobjid FROM pg_attrdef f JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid AND d.refclassid = 'pg_class'::regclass
			        WHERE f.adrelid = a.attrelid AND f.adnum = a.attnum) n ON true
			  JOIN pg_class s ON s.oid = n.seq AND s.relkind = 'S' JOIN pg_sequence q ON q.seqrelid = s.oid
			 WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, 2`, t.OID)
		if err != nil {
			return err
		}
		out, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (s backfill.Sequence, err error) {
			var readable bool
			err = r.Scan(&s.Column, &s.Name, &s.Step, &readable)
			if !readable {
				s.Problem = "the agent may not read it: GRANT SELECT ON SEQUENCE " + s.Name + " TO " + db.role()
			}
			return s, err
		})
		if err != nil {
			return err
		}
		for i := range out {
			if err := current(ctx, tx, t, &out[i]); err != nil {
				return err
			}
		}
		return nil
	})
	return out, err
}

// current reads where a sequence and its column stand; of a sequence that may not be
// read the column alone, which is all that is asked of a source. Without an index on the
// column that may take too long to be told.
func current(ctx context.Context, tx pgx.Tx, t *Table, s *backfill.Sequence) error {
	highest := map[bool]string{true: "max", false: "min"}[s.Step > 0]
	next, from := fmt.Sprintf("last_value + CASE WHEN is_called THEN %d ELSE 0 END", s.Step), " FROM "+s.Name
	if s.Problem != "" {
		next, from = "0::bigint", ""
	}
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL statement_timeout = '3s'`); err != nil {
			return err
		}
		return tx.QueryRow(ctx, fmt.Sprintf(`SELECT %s, (SELECT %s(t.%s)::bigint FROM %s t)%s`,
			next, highest, row.Ident(s.Column), t.SQL, from)).Scan(&s.Next, &s.Highest)
	})
	switch state := SQLState(err); {
	case state == queryCanceled:
		s.Problem = "its highest value takes too long to find: an index on the column helps"
	case strings.HasPrefix(state, "22"), strings.HasPrefix(state, "42"):
		s.Problem = brief(err)
	default:
		return err
	}
	return nil
}
