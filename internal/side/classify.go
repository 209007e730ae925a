package side

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/copypipe"
	"backfill/internal/row"
)

// Classify says of a chunk of staged rows what releasing them would do here, as
// the table is now. keys writes the chunk in COPY's binary form (n, key), rows those of
// some numbers (n, key, row, in the columns of layout): where there is no row of the
// key here, the staged one need not come. store is given the answer in the same form:
// request_id, n, effect (i insert, o overwrite, = identical, ? not to be told), for
// an overwrite the row that is here, in the staged row's columns, and NULL twice.
//
// Identical means the same text in every column that travels: a value that is
// equal by its type but spelled otherwise, 1.0 and 1.00, is an overwrite. Of a row
// that is identical nothing is told while a change of its key is set aside here,
// because a retry of that would change the row again.
//
// keys may be nil: no row is loaded, and none given an effect. bounds, of rows that were
// staged in the order of their keys, are the chunk's first and last key: where nothing
// here lies between them, and in a table without any page, no row is loaded either, and
// fresh is called in place of store: all are inserts.
//
// A row whose key cannot be read as the types of the key here has the effect ? too, with
// PostgreSQL's reason.
//
// With a mapping the effect is that of the row that it makes, and that row follows, or
// why there is none; such a row has the effect ?, and the row that is here is in the
// columns that the mapping makes.
//
// at, which store is told, is how far at least the other side's changes had been
// applied when the rows were looked at: changes above it may change what is identical.
func (db *DB) Classify(ctx context.Context, requestID int64, tableID int32, r Relation, mapping *row.Mapping, layout *row.Layout, bounds []backfill.Key, keys func(io.Writer) error, rows func(numbers []int64, w io.Writer) error, store func(at int64, r io.Reader) error, fresh func(at int64) error) error {
	parsed, err := backfill.ParseTableName(r.Name)
	if err != nil {
		return err
	}
	// In one snapshot: a row that came to be here after it was asked which staged rows
	// are wanted could not be compared.
	return db.in(ctx, comparing, func(tx pgx.Tx) error {
		if err := lock(ctx, tx, row.Ident(parsed.Schema, parsed.Name)); err != nil {
			return err
		}
		var at int64
		if err := tx.QueryRow(ctx, `
			SELECT least(seq, (SELECT stopped_at FROM `+db.schema+`.refused WHERE table_id = $1)) FROM `+db.schema+`.applied`, tableID).Scan(&at); err != nil {
			return db.orNotSetUp(err)
		}
		t, err := describeRelation(ctx, tx, r)
		if err != nil {
			return err
		}
		if t.Problem != "" {
			return fmt.Errorf("%w: %s", ErrLayout, t.Problem)
		}
		seen := layout
		if mapping != nil {
			if !mapping.KeyOf(layout) {
				return fmt.Errorf("%w: its mapping was made for another key than the rows have: set the mapping again", ErrLayout)
			}
			mapping = mapping.On(t.Layout)
			seen = mapping.Layout(nil)
		}
		here, err := asStaged(seen, t.Layout)
		if err != nil {
			return err
		}
		// A row may have a character that a database of another encoding lacks: all are loaded.
		anyCharacter := tx.Conn().PgConn().ParameterStatus("server_encoding") == "UTF8"
		alike := sameKeyTypes(layout, t.Layout)
		if keys != nil && anyCharacter && mapping == nil && alike {
			if none, err := nothingBetween(ctx, tx, t, layout, bounds); err != nil {
				return err
			} else if none {
				return fresh(at)
			}
		}
		if _, err := tx.Exec(ctx, byIndex+`
			CREATE TEMP TABLE IF NOT EXISTS chunk (n bigint, key text[] COLLATE "C", "row" text[] COLLATE "C", problem text) ON COMMIT DELETE ROWS`); err != nil {
			return err
		}
		load := func(columns string, from func(io.Writer) error) error {
			return copypipe.Run(from, func(r io.Reader) error {
				_, err := tx.Conn().PgConn().CopyFrom(ctx, r, `COPY pg_temp.chunk (`+columns+`) FROM STDIN (FORMAT binary)`)
				return err
			})
		}
		if keys != nil {
			if err := load(`n, key`, keys); err != nil {
				return err
			}
			if !alike {
				if err := readableKeys(ctx, tx, t.Layout); err != nil {
					return err
				}
			}
			wanted := fmt.Sprintf(`USING %s t WHERE %s`, t.SQL, t.Layout.KeyEquals("t", "c.key"))
			if mapping != nil || !anyCharacter {
				wanted = "WHERE c.problem IS NULL" // all: what is made of each is shown, or a row may have a character that this database lacks
			}
			var numbers []int64
			if err := tx.QueryRow(ctx, `
				WITH wanted AS (DELETE FROM pg_temp.chunk c `+wanted+` RETURNING c.n) SELECT array_agg(n) FROM wanted`).Scan(&numbers); err != nil {
				return err
			}
			if numbers != nil {
				if err := load(`n, key, "row"`, func(w io.Writer) error { return rows(numbers, w) }); err != nil {
					return err
				}
				if mapping != nil {
					if missing := mapping.Missing(layout); missing != "" {
						return fmt.Errorf("%w: its mapping uses column %s, which the rows do not have", ErrLayout, row.Ident(missing))
					}
					made := `UPDATE pg_temp.chunk c SET "row" = ` + mapping.RowFrom(layout, `c."row"`) + ` WHERE c.n = ANY ($1)`
					if err := eachOrWhy(ctx, tx, made, numbers); err != nil {
						return err
					}
				}
			}
		}
		result := "NULL::text[], c.problem"
		if mapping != nil {
			result = `c."row", c.problem`
		}
		sql := fmt.Sprintf(`COPY (
			SELECT %d::bigint, c.n, (CASE WHEN c.problem IS NOT NULL THEN '?' WHEN t.tableoid IS NULL THEN 'i' WHEN h.here <> c."row" THEN 'o'
			             WHEN EXISTS (SELECT FROM %s.held d WHERE d.table_id = %d AND d.key = c.key) THEN '?' ELSE '=' END)::"char",
			       CASE WHEN t.tableoid IS NOT NULL AND h.here <> c."row" THEN h.here END, %s
			  FROM pg_temp.chunk c LEFT JOIN %s t ON %s,
			       LATERAL (SELECT %s COLLATE "C" AS here) h
			 ORDER BY c.n) TO STDOUT (FORMAT binary)`,
			requestID, db.schema, tableID, result, t.SQL, t.Layout.KeyEquals("t", "c.key"), here)
		return copypipe.Run(func(w io.Writer) error {
			_, err := tx.Conn().PgConn().CopyTo(ctx, w, sql)
			return err
		}, func(r io.Reader) error { return store(at, r) })
	})
}

// readableKeys marks the keys of the chunk that cannot be read as the types of a table's
// key, and forgets them: no row of it has such a key.
func readableKeys(ctx context.Context, tx pgx.Tx, here *row.Layout) error {
	var numbers []int64
	if err := tx.QueryRow(ctx, `SELECT array_agg(n) FROM pg_temp.chunk`).Scan(&numbers); err != nil || numbers == nil {
		return err
	}
	if err := eachOrWhy(ctx, tx, `SELECT count(ROW(`+strings.Join(here.KeyFrom("c.key"), ", ")+`)) FROM pg_temp.chunk c WHERE c.n = ANY ($1)`, numbers); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `UPDATE pg_temp.chunk SET key = NULL WHERE problem IS NOT NULL`)
	return err
}

// eachOrWhy runs sql for the rows of the chunk that are numbered, by halves where it is
// refused for some: each of those says why.
func eachOrWhy(ctx context.Context, tx pgx.Tx, sql string, numbers []int64) error {
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sql, numbers)
		return err
	})
	switch {
	case err == nil || !refusesRows(err):
		return err
	case len(numbers) == 1:
		_, err = tx.Exec(ctx, `UPDATE pg_temp.chunk SET "row" = NULL, problem = $2 WHERE n = $1`, numbers[0], Message(err))
		return err
	}
	half := len(numbers) / 2
	if err := eachOrWhy(ctx, tx, sql, numbers[:half]); err != nil {
		return err
	}
	return eachOrWhy(ctx, tx, sql, numbers[half:])
}

// sameKeyTypes reports whether every staged key can be read as one of a table here.
func sameKeyTypes(staged, here *row.Layout) bool {
	return slices.EqualFunc(staged.KeyColumns(), here.KeyColumns(), func(a, b row.Column) bool { return a.Type == b.Type })
}

// nothingBetween reports whether the table holds no row of a chunk, as far as that is
// told by its size, or by one look into the index of its key.
func nothingBetween(ctx context.Context, tx pgx.Tx, t *Table, staged *row.Layout, bounds []backfill.Key) (none bool, err error) {
	if err := tx.QueryRow(ctx, `
		SELECT pg_relation_size($1::oid) = 0 AND NOT EXISTS (SELECT FROM pg_partition_tree($1::oid::regclass) WHERE pg_relation_size(relid) > 0)`, t.OID).Scan(&none); err != nil || none {
		return none, err
	}
	if bounds == nil || !sameOrder(staged, t.Layout) {
		return false, nil
	}
	if _, err := tx.Exec(ctx, `SET LOCAL enable_seqscan = off`); err != nil {
		return false, err
	}
	err = tx.QueryRow(ctx, fmt.Sprintf(`SELECT NOT EXISTS (SELECT FROM %s t WHERE %s AND %s)`, t.SQL, t.Layout.KeyFromOn("t", bounds[0]), t.Layout.KeyUpTo("t", bounds[1]))).Scan(&none)
	if err != nil {
		return false, err
	}
	_, err = tx.Exec(ctx, `SET LOCAL enable_seqscan = on`)
	return none, err
}

// sameOrder reports whether keys have one order on both sides: they are of the same types,
// and of such as know no collation.
func sameOrder(staged, here *row.Layout) bool {
	there := staged.KeyColumns()
	return !slices.ContainsFunc(here.KeyColumns(), func(c row.Column) bool {
		i := slices.IndexFunc(there, func(s row.Column) bool { return s.Name == c.Name })
		return there[i].Type != c.Type || !slices.Contains(ordered, c.Type)
	})
}

// ordered are the types of most keys that have one order wherever they are.
var ordered = []string{"smallint", "integer", "bigint", "numeric", "uuid", "date", "timestamp without time zone", "timestamp with time zone"}

// asStaged is the SQL of a row here as text[], in the order of the staged columns.
func asStaged(staged, here *row.Layout) (string, error) {
	if strings.Join(staged.Key, "\x00") != strings.Join(here.Key, "\x00") {
		return "", fmt.Errorf("%w: its key is another than on the source", ErrLayout)
	}
	out := row.Layout{Key: here.Key}
	for _, c := range staged.Columns {
		h, ok := here.Column(c.Name)
		if !ok {
			return "", fmt.Errorf("%w: column %s does not exist here", ErrLayout, row.Ident(c.Name))
		}
		out.Columns = append(out.Columns, h)
	}
	return out.RowText("t"), nil
}
