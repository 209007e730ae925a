package side

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"backfill/internal/backfill"
	"backfill/internal/row"
)

// Relation is a table of this side, and how its rows are seen.
type Relation struct {
	Name string
	Key  []string     // the columns of its key, nil for the one it has
	Made *row.Mapping // on the source: rows are seen as this makes them, nil as they are
	// Claimed is the mapping whose claims are seen beside the columns on the receiver.
	Claimed *row.Mapping
}

// describeRelation is describe of a table as it is seen.
func describeRelation(ctx context.Context, tx pgx.Tx, r Relation) (*Table, error) {
	t, err := describeKeyed(ctx, tx, r.Name, r.Key)
	if err != nil || t.Problem != "" {
		return t, err
	}
	if m := r.Claimed; m != nil {
		// The source would bring its values to the types of before.
		if altered := m.Altered(t.Layout); altered != "" {
			t.Problem = fmt.Sprintf("%s: %s when its mapping was checked: set the mapping again", t.Name, altered)
			return t, nil
		}
	}
	if m := r.Claimed; m != nil && len(m.Claims) > 0 {
		t.SQL, t.Layout = m.Claimed(t.SQL), m.Compared(t.Layout)
	}
	if r.Made == nil {
		return t, nil
	}
	if !r.Made.KeyOf(t.Layout) {
		t.Problem = fmt.Sprintf("%s has another key than its mapping was made for: set the mapping again", t.Name)
		return t, nil
	}
	if missing := r.Made.Missing(t.Layout); missing != "" {
		t.Problem = fmt.Sprintf("%s has no column %s any more, which its mapping uses: set another mapping", t.Name, row.Ident(missing))
		return t, nil
	}
	t.SQL, t.Layout = r.Made.Relation(t.SQL), r.Made.Compared(r.Made.Layout(t.Layout))
	return t, nil
}

// SampleOfSource describes a table of the source for a mapping, with up to limit of its
// rows, of which large ones are left out.
func (db *DB) SampleOfSource(ctx context.Context, name string, limit int) (t *Table, rows [][]*string, err error) {
	err = db.in(ctx, reading, func(tx pgx.Tx) error {
		if t, err = describe(ctx, tx, name); err != nil || t.Problem != "" {
			return err
		}
		found, err := tx.Query(ctx, fmt.Sprintf(`SELECT %s FROM %s t WHERE %s < %d ORDER BY %s LIMIT %d`,
			t.Layout.RowText("t"), t.SQL, t.Layout.Sizes("t"), sampleBytes, t.Layout.KeyRefs("t"), limit))
		if err != nil {
			return err
		}
		rows, err = pgx.CollectRows(found, pgx.RowTo[[]*string])
		return err
	})
	return t, rows, err
}

// Trial is what a mapping came to here.
type Trial struct {
	Made   *row.Mapping
	Fields []backfill.FieldError // what keeps it from being used, none when it can be
	Rows   []TrialRow
}

// TrialRow is a row of the source and what the mapping makes of it, or why it cannot.
type TrialRow struct {
	Source  []*string `json:"source"`
	Result  []*string `json:"result"`
	Problem string    `json:"problem,omitempty"`
}

// errTried takes back what a trial has made.
var errTried = errors.New("only tried")

// TryMapping checks a mapping against this side's table, for rows of the source under a
// layout, and tries it on some of them. Nothing of it stays.
//
// An expression is checked as that of a generated column: PostgreSQL lets one of those
// name only the columns of its row, call only immutable functions, and have no
// subquery, and says what it depends on.
func (db *DB) TryMapping(ctx context.Context, m *backfill.Mapping, target string, source *row.Layout, rows [][]*string) (*Trial, error) {
	t := &trial{mapping: m, source: source}
	err := db.in(ctx, writing, func(tx pgx.Tx) error {
		if err := t.try(ctx, tx, target, db.Side); err != nil {
			return err
		}
		for _, r := range rows {
			tried := TrialRow{Source: r}
			if len(t.Fields) == 0 {
				err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
					return tx.QueryRow(ctx, `SELECT r.made FROM (SELECT $1::text[] AS "row") i, LATERAL (SELECT `+t.Made.RowFrom(source, `i."row"`)+` AS made) r`, r).Scan(&tried.Result)
				})
				if err != nil && !refusesRows(err) {
					return err
				}
				if err != nil {
					tried.Problem = Message(err)
				}
			}
			t.Rows = append(t.Rows, tried)
		}
		return errTried
	})
	if !errors.Is(err, errTried) {
		return nil, err
	}
	return &t.Trial, nil
}

// AgreeOnMapping checks that this side, the source, makes the same of a mapping's
// expressions as the receiver, so that its rows can be compared, and notes which of its
// columns the claims name.
func (db *DB) AgreeOnMapping(ctx context.Context, source string, made *row.Mapping) (fields []backfill.FieldError, err error) {
	err = db.in(ctx, writing, func(tx pgx.Tx) error {
		d, err := describe(ctx, tx, source)
		if err != nil {
			return err
		}
		if d.Problem != "" {
			fields = append(fields, backfill.FieldError{Field: "mapping.source", Message: d.Problem})
			return errTried
		}
		c := &checker{tx: tx, side: db.Side}
		if err := c.begin(ctx, d.Layout); err != nil {
			return err
		}
		for _, column := range made.Columns {
			if column.Expr == "" {
				continue
			}
			_, problem, err := c.check(ctx, column.Expr, column.Column)
			if err != nil {
				return err
			}
			if problem != "" {
				fields = append(fields, backfill.FieldError{Field: "mapping.columns." + column.Name, Message: problem})
			}
		}
		for i, claim := range made.Claims {
			uses, problem, err := c.check(ctx, claim.Source, row.Column{Type: "text", Declared: "text"})
			if err != nil {
				return err
			}
			if problem != "" {
				fields = append(fields, backfill.FieldError{Field: "mapping.prove." + claim.Name, Message: "source: " + problem})
			}
			made.Claims[i].Uses = uses
		}
		return errTried
	})
	if !errors.Is(err, errTried) {
		return nil, err
	}
	return fields, nil
}

// trial is one try of a mapping on the receiver.
type trial struct {
	Trial
	mapping *backfill.Mapping
	source  *row.Layout
}

func (t *trial) refuse(field, format string, args ...any) {
	t.Fields = append(t.Fields, backfill.FieldError{Field: "mapping." + field, Message: fmt.Sprintf(format, args...)})
}

func (t *trial) try(ctx context.Context, tx pgx.Tx, target, side string) error {
	m := t.mapping
	d, err := describe(ctx, tx, target)
	switch {
	case err != nil:
		return err
	case d.Layout == nil:
		t.refuse("target", "side %s: %s", side, d.Problem)
		return nil
	}
	defaults, empty, err := defaulted(ctx, tx, d.OID)
	if err != nil {
		return err
	}
	c := &checker{tx: tx, side: side}
	if err := c.begin(ctx, t.source); err != nil {
		return err
	}
	for _, name := range m.Drop {
		if _, ok := t.source.Column(name); !ok {
			t.refuse("drop", "the source has no column %s", row.Ident(name))
		}
	}
	for name := range m.Columns {
		if _, ok := d.Layout.Column(name); !ok {
			t.refuse("columns."+name, "%s has no column %s that can be written", d.Name, row.Ident(name))
		}
	}
	t.Made = &row.Mapping{}
	used := map[string]bool{}
	for _, column := range d.Layout.Columns {
		expr, listed := m.Columns[column.Name]
		expr = strings.TrimSpace(expr)
		made := row.Mapped{Column: column}
		switch same, ok := t.source.Column(column.Name); {
		case listed && strings.EqualFold(expr, backfill.UseDefault):
			if !defaults[column.Name] && !empty[column.Name] {
				t.refuse("columns."+column.Name, "%s has no default for it, and it is NOT NULL", d.Name)
			}
			continue
		case listed:
			made.From = t.bare(expr)
		case ok && !slices.Contains(m.Drop, same.Name):
			made.From = same.Name
		case !defaults[column.Name] && !(ok && empty[column.Name]): // one that is dropped may stay as it is there
			t.refuse("columns."+column.Name, "nothing makes it, and %s has no default for it: give an expression, or null", d.Name)
			continue
		default:
			continue
		}
		if made.From == "" {
			made.Expr = expr
		}
		text := made.Expr
		if made.From != "" {
			text = row.Ident(made.From)
		}
		from, _ := t.source.Column(made.From)
		if made.From == "" || from.Type != column.Type {
			// What an assignment converts is more than its text read anew: 1.5 as an integer, a
			// time as a date. A deleted row's key comes as text, and is that.
			if made.From != "" && !slices.Contains(t.source.Key, made.From) {
				converts := false
				if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_cast WHERE castsource = to_regtype($1) AND casttarget = to_regtype($2) AND castmethod = 'f')`,
					from.Type, column.Type).Scan(&converts); err != nil {
					return err
				}
				if converts {
					made.From, made.Expr = "", text
				}
			}
			uses, problem, err := c.check(ctx, text, column)
			if err != nil {
				return err
			}
			if problem != "" {
				t.refuse("columns."+column.Name, "%s", problem)
				continue
			}
			if made.Expr != "" {
				made.Uses = uses
			}
		}
		for _, name := range append([]string{made.From}, made.Uses...) {
			used[name] = true
		}
		t.Made.Columns = append(t.Made.Columns, made)
	}
	for _, column := range t.source.Columns {
		dropped := slices.Contains(m.Drop, column.Name)
		switch {
		case dropped && used[column.Name]:
			t.refuse("drop", "column %s is used", row.Ident(column.Name))
		case !dropped && !used[column.Name] && len(t.Fields) == 0:
			t.refuse("drop", "column %s of the source goes nowhere: use it in an expression, or list it here", row.Ident(column.Name))
		}
	}
	return t.key(ctx, tx, target, side)
}

// bare returns the source column that an expression is just the name of, or "".
func (t *trial) bare(expr string) string {
	for _, c := range t.source.Columns {
		if expr == row.Ident(c.Name) || expr == c.Name && strings.ToLower(expr) == expr && row.CheckExpression(expr) == nil && !strings.ContainsAny(expr, ` "'`) {
			return c.Name
		}
	}
	return ""
}

// key finds the columns of the target that hold the source's key, and its unique index
// over them. Deletes bring nothing but the key, so that each is one of its columns.
func (t *trial) key(ctx context.Context, tx pgx.Tx, target, side string) error {
	for _, name := range t.source.Key {
		found := ""
		for _, c := range t.Made.Columns {
			if c.From == name && (t.mapping.Key == nil && found == "" || slices.Contains(t.mapping.Key, c.Name)) {
				found = c.Name
			}
		}
		if found == "" {
			t.refuse("key", "no column of it is column %s of the source's key (%s) alone: a deleted row is known by that", row.Ident(name), strings.Join(t.source.Key, ", "))
			return nil
		}
		t.Made.Key = append(t.Made.Key, found)
	}
	if len(t.mapping.Key) > len(t.Made.Key) {
		t.refuse("key", "it has more columns than the source's key (%s)", strings.Join(t.source.Key, ", "))
		return nil
	}
	d, err := describeKeyed(ctx, tx, target, t.Made.Key)
	if err != nil {
		return err
	}
	if d.Problem != "" {
		t.refuse("key", "side %s: %s", side, d.Problem)
		return nil
	}
	for i, c := range t.Made.Columns {
		t.Made.Columns[i].Column, _ = d.Layout.Column(c.Name)
		if from, ok := t.source.Column(c.From); ok && slices.Contains(t.Made.Key, c.Name) && !lossless(from, c.Column) {
			t.refuse("columns."+c.Name, "it is %s and the source's key column %s is %s: two keys of the source could become one; make it %[3]s", c.Declared, row.Ident(c.From), from.Declared)
		}
	}
	return t.claims(ctx, tx, d.Layout, side)
}

// lossless reports whether keys that differ on the source differ in a column of the
// receiver too.
func lossless(from, to row.Column) bool {
	if from.Declared == to.Declared {
		return true
	}
	width := map[string]int{"smallint": 2, "integer": 4, "bigint": 8, "numeric": 9}
	if width[from.Type] > 0 && to.Declared == to.Type && width[to.Type] >= width[from.Type] {
		return true
	}
	texts := []string{"text", "character varying"}
	return slices.Contains(texts, from.Type) && slices.Contains(texts, to.Type)
}

// claims checks what is to be proven beside the columns: the sides' expressions over
// their own rows.
func (t *trial) claims(ctx context.Context, tx pgx.Tx, target *row.Layout, side string) error {
	c := &checker{tx: tx, side: side, as: "target"}
	if err := c.begin(ctx, target); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(t.mapping.Prove)) {
		claim := t.mapping.Prove[name]
		_, problem, err := c.check(ctx, claim.Target, row.Column{Type: "text", Declared: "text"})
		if err != nil {
			return err
		}
		if problem != "" {
			t.refuse("prove."+name, "target: %s", problem)
		}
		t.Made.Claims = append(t.Made.Claims, row.Claim{Name: name, Source: claim.Source, Target: claim.Target})
	}
	return nil
}

// defaulted tells which columns of a table have a value when none is given (a default,
// an identity, or one that a domain brings), and which may be empty.
func defaulted(ctx context.Context, tx pgx.Tx, oid uint32) (defaults, empty map[string]bool, err error) {
	rows, err := tx.Query(ctx, `
		SELECT a.attname::text, a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL, NOT a.attnotnull AND NOT t.typnotnull
		  FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
		 WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped`, oid)
	if err != nil {
		return nil, nil, err
	}
	defaults, empty = map[string]bool{}, map[string]bool{}
	var name string
	var has, may bool
	_, err = pgx.ForEachRow(rows, []any{&name, &has, &may}, func() error {
		defaults[name], empty[name] = has, may
		return nil
	})
	return defaults, empty, err
}

// checker checks expressions over the rows of a source.
type checker struct {
	tx     pgx.Tx
	side   string
	as     string            // the name of the row in expressions: source, or target for claims about that
	absent map[string]string // columns whose type there is not here, with that
}

// checked is the column as which an expression is tried.
const checked = `"backfill checks this"`

// begin makes a table of the source's columns, of which a generated column can be made.
func (c *checker) begin(ctx context.Context, source *row.Layout) error {
	types := make([]string, len(source.Columns))
	for i, column := range source.Columns {
		types[i] = column.Type
	}
	rows, err := c.tx.Query(ctx, `SELECT to_regtype(t) IS NOT NULL FROM unnest($1::text[]) WITH ORDINALITY u (t, n) ORDER BY n`, types)
	if err != nil {
		return err
	}
	there, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	if err != nil {
		return err
	}
	var columns []string
	c.absent = map[string]string{}
	for i, column := range source.Columns {
		if !there[i] {
			c.absent[column.Name] = column.Type
			continue
		}
		columns = append(columns, row.Ident(column.Name)+" "+column.Declared)
	}
	if c.as == "" {
		c.as = "source"
	}
	_, err = c.tx.Exec(ctx, "CREATE TEMP TABLE "+c.as+" ("+strings.Join(columns, ", ")+") ON COMMIT DROP")
	return err
}

// check tries an expression as that of a column, and returns the source columns that it
// names, or PostgreSQL's own word on why it cannot be that.
func (c *checker) check(ctx context.Context, expr string, as row.Column) (uses []string, problem string, err error) {
	if err := row.CheckExpression(expr); err != nil {
		return nil, err.Error(), nil
	}
	err = pgx.BeginFunc(ctx, c.tx, func(tx pgx.Tx) error {
		// In the extended protocol a second statement would be an error too.
		if _, err := tx.Exec(ctx, `ALTER TABLE pg_temp.`+c.as+` ADD COLUMN `+checked+` `+as.Declared+` GENERATED ALWAYS AS (`+expr+`) STORED`, pgx.QueryExecModeExec); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			SELECT DISTINCT a.attname::text, a.attnum < 0 FROM pg_depend d
			  JOIN pg_attribute n ON n.attrelid = ('pg_temp.' || $2)::regclass AND n.attname = $1
			  JOIN pg_attribute a ON a.attrelid = n.attrelid AND a.attnum = d.refobjsubid AND a.attnum <> n.attnum
			 WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = n.attrelid
			   AND (d.classid = 'pg_class'::regclass AND d.objid = n.attrelid AND d.objsubid = n.attnum
			     OR d.classid = 'pg_attrdef'::regclass AND d.objid = (SELECT f.oid FROM pg_attrdef f WHERE f.adrelid = n.attrelid AND f.adnum = n.attnum))
			 ORDER BY 1`, strings.Trim(checked, `"`), c.as)
		if err != nil {
			return err
		}
		var name string
		var system bool
		if _, err := pgx.ForEachRow(rows, []any{&name, &system}, func() error {
			if uses = append(uses, name); system {
				problem = name + " is PostgreSQL's own and another on each side: name columns of the table alone"
			}
			return nil
		}); err != nil {
			return err
		}
		return errTried
	})
	switch state := SQLState(err); {
	case errors.Is(err, errTried):
		return uses, problem, nil
	case strings.HasPrefix(state, "42"), strings.HasPrefix(state, "22"), strings.HasPrefix(state, "0A"), strings.HasPrefix(state, "3F"):
		return nil, c.explain(err), nil
	}
	return nil, "", err
}

// explain says what PostgreSQL has against an expression in the words of a mapping.
func (c *checker) explain(err error) string {
	message := brief(err)
	switch SQLState(err) {
	case "42P17": // invalid_object_definition
		return "on " + c.side + " it is not immutable: its result must depend on nothing but the row"
	case "42804": // datatype_mismatch
		message = strings.NewReplacer("column "+checked+" is of type", "the column is of type", "default expression", "the expression").Replace(message)
	case "42703": // undefined_column
		for name, typ := range c.absent {
			if strings.Contains(message, `"`+name+`"`) {
				return fmt.Sprintf("the type %s of the source's column %s does not exist on %s: create it there", typ, row.Ident(name), c.side)
			}
		}
	case "42883", "42704": // undefined_function, undefined_object
		message += "; names that are not PostgreSQL's own need their schema, such as public.citext, and must exist on both sides"
	case "0A000": // feature_not_supported
		message = strings.Replace(message, "column generation expression", "the expression of a mapping", 1)
	}
	return "on " + c.side + ": " + strings.ReplaceAll(message, "column generation expression", "the expression of a mapping")
}
