// Package row holds layouts and the encoding of rows: the PostgreSQL output text
// of each column, in the order of a recorded layout, under pinned settings. Text
// in, text out: it is lossless for every type, and Go never looks into a value.
package row

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Layout is the shape of a table at a moment: the columns that travel, in order,
// and the key. A row encoded under a layout can be read only with it.
type Layout struct {
	Columns []Column `json:"columns"`
	Key     []string `json:"key"` // key columns in key order
}

// Column is one column that travels. Generated columns do not.
type Column struct {
	Name string `json:"name"`
	// Type is the type's name without length or precision, quoted as SQL needs it:
	// casting to it never cuts a value, the column's own limits do the checking.
	Type string `json:"type"`
	// Declared is the type as declared, for people and for the fingerprint.
	Declared string `json:"declared"`
	// Whole is the type behind domains, where a cast to Type would cut a value to their length.
	Whole string `json:"whole,omitempty"`
	// Parts says that a cast would cut within the value, an attribute of a composite for
	// one: only the type's input function refuses what is too long.
	Parts bool `json:"parts,omitempty"`
	// Labels are an enum's labels in order.
	Labels []string `json:"labels,omitempty"`
	// Function says that the type's cast to text is a function rather than its output
	// function (bool prints true instead of t, bpchar loses its blanks), so that the
	// output function has to be asked for.
	Function bool `json:"function,omitempty"`
	// Via is the string type through which the text is read back, where a cast from text
	// would be a function rather than the input function.
	Via string `json:"via,omitempty"`
	// Byte says that the type is "char", a byte of any value: those above 127 are no text
	// before PostgreSQL 16, and are written as 16 does, \303.
	Byte bool `json:"byte,omitempty"`
	// Collation is the column's collation, quoted, when it is not the database's default.
	Collation string `json:"collation,omitempty"`
	// Operators is the schema of a key column's comparison operators, quoted, when it
	// is not pg_catalog: under the pinned search_path citext's "=" would be text's.
	Operators string `json:"operators,omitempty"`
	// Comparisons are the names of those operators in the order of Comparisons, where
	// they are others: hstore is ordered by #<#.
	Comparisons []string `json:"comparisons,omitempty"`
	// AlwaysIdentity says GENERATED ALWAYS AS IDENTITY: insertable when overriding, never updatable.
	AlwaysIdentity bool `json:"always_identity,omitempty"`
}

// Comparisons are the usual names of the operators that order a type, in the order
// of btree's strategies.
var Comparisons = []string{"<", "<=", "=", ">=", ">"}

// Fingerprint identifies a layout across databases: equal fingerprints mean that
// rows of one can be read as rows of the other.
func (l *Layout) Fingerprint() string {
	// JSON is self-delimiting and has one field order here.
	b, err := json.Marshal(l)
	if err != nil {
		panic(err) // strings and booleans always marshal
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Column returns the column of a name.
func (l *Layout) Column(name string) (Column, bool) {
	i := l.index(name)
	if i < 0 {
		return Column{}, false
	}
	return l.Columns[i], true
}

func (l *Layout) index(name string) int {
	return slices.IndexFunc(l.Columns, func(c Column) bool { return c.Name == name })
}

// KeyColumns returns the key's columns in key order.
func (l *Layout) KeyColumns() []Column {
	out := make([]Column, 0, len(l.Key))
	for _, name := range l.Key {
		c, _ := l.Column(name)
		out = append(out, c)
	}
	return out
}

// Ident quotes an identifier.
func Ident(parts ...string) string { return pgx.Identifier(parts).Sanitize() }

// Literal quotes a string constant. It relies on standard_conforming_strings,
// which every connection of ours pins.
func Literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// Text is the one expression that turns a column into its text, in triggers,
// pushes, walks and comparisons alike. source is an alias.
func (c Column) Text(source string) string { return c.textOf(source + "." + Ident(c.Name)) }

// textOf is the text of an expression of the column's type.
func (c Column) textOf(ref string) string {
	switch {
	case c.Byte:
		return "CASE WHEN " + ref + "::int < 0 THEN encode(charsend(" + ref + "), 'escape') WHEN " + ref + " IS NOT NULL THEN concat(" + ref + ") END"
	case !c.Function:
		return ref + "::text"
	}
	// concat calls the output function, but makes NULL an empty string. IS NOT NULL
	// would be false for a composite with a NULL in it.
	return "CASE WHEN " + ref + " IS DISTINCT FROM NULL THEN concat(" + ref + ") END"
}

// Respells reports whether keys that are equal may have different texts, as 1.0 and 1.00.
func (l *Layout) Respells() bool {
	return slices.ContainsFunc(l.KeyColumns(), func(c Column) bool {
		switch c.Type {
		case "smallint", "integer", "bigint", "uuid", "date":
			return false
		case "text", "character varying":
			return c.Collation != "" // it may be a nondeterministic one
		}
		return true
	})
}

// Printed is Text for a function that runs with rights which the table's owner has not:
// whatever the column's type becomes, no cast of somebody's own making is called, only
// the type's output function.
func (c Column) Printed(source string) string {
	if !c.Byte {
		c.Function = true
	}
	return c.Text(source)
}

// KeyText is the SQL of a row's key as text[], from a row source of that alias.
func (l *Layout) KeyText(source string) string { return array(l.KeyColumns(), source, Column.Text) }

// KeyPrinted is KeyText by Printed.
func (l *Layout) KeyPrinted(source string) string {
	return array(l.KeyColumns(), source, Column.Printed)
}

// RowText is the SQL of a whole row as text[], from a row source of that alias.
func (l *Layout) RowText(source string) string { return array(l.Columns, source, Column.Text) }

func array(columns []Column, source string, text func(Column, string) string) string {
	parts := make([]string, len(columns))
	for i, c := range columns {
		parts[i] = text(c, source)
	}
	return "ARRAY[" + strings.Join(parts, ", ") + "]::text[]"
}

// Sizes is the SQL of about how many bytes the text of a row has, without reading
// values that are stored outside the row. Compressed values of types whose length
// cannot be told are taken for eight times their size.
func (l *Layout) Sizes(source string) string {
	parts := make([]string, len(l.Columns))
	for i, c := range l.Columns {
		ref := source + "." + Ident(c.Name)
		switch c.Type {
		case "text", "character varying":
			parts[i] = "octet_length(" + ref + ")"
		case "bytea":
			parts[i] = "2::bigint * octet_length(" + ref + ")"
		default:
			parts[i] = "CASE WHEN pg_column_compression(" + ref + ") IS NULL THEN 1::bigint ELSE 8 END * pg_column_size(" + ref + ")"
		}
		parts[i] = "coalesce(" + parts[i] + ", 0)::bigint"
	}
	return strings.Join(parts, " + ")
}

// KeyRefs lists the key columns of an alias, for comparing and ordering.
func (l *Layout) KeyRefs(source string) string {
	parts := make([]string, len(l.Key))
	for i, name := range l.Key {
		parts[i] = source + "." + Ident(name)
	}
	return strings.Join(parts, ", ")
}

// KeyConstants is a key's values as typed constants, separated by commas.
func (l *Layout) KeyConstants(key []string) string {
	parts := make([]string, len(key))
	for i, c := range l.KeyColumns() {
		parts[i] = c.constant(key[i])
	}
	return strings.Join(parts, ", ")
}

// KeyFrom is the SQL that reads a key's columns back from the text[] expression.
func (l *Layout) KeyFrom(expr string) []string {
	parts := make([]string, len(l.Key))
	for i, c := range l.KeyColumns() {
		parts[i] = c.Read(subscript(expr, i))
		if c.Collation != "" {
			parts[i] += " COLLATE " + c.Collation
		}
	}
	return parts
}

// KeyEquals is the SQL that compares the key columns of an alias with a key read
// back from the text[] expression, by the type's own equality.
func (l *Layout) KeyEquals(source, expr string) string {
	parts := make([]string, len(l.Key))
	values := l.KeyFrom(expr)
	for i, c := range l.KeyColumns() {
		parts[i] = source + "." + Ident(c.Name) + " " + c.operator("=") + " " + values[i]
	}
	return strings.Join(parts, " AND ")
}

// KeyAfter is the SQL for "the key of an alias comes after this one", and KeyUpTo
// for "not after". All columns ascend and none is NULL.
func (l *Layout) KeyAfter(source string, key []string) string { return l.compare(source, key, ">") }

// KeyFromOn is the SQL for "the key of an alias is this one or comes after it".
func (l *Layout) KeyFromOn(source string, key []string) string { return l.compare(source, key, ">=") }

// KeyUpTo is the SQL for "the key of an alias is this one or comes before it".
func (l *Layout) KeyUpTo(source string, key []string) string { return l.compare(source, key, "<=") }

// KeyIs is the SQL for "the key of an alias is this one".
func (l *Layout) KeyIs(source string, key []string) string {
	parts := make([]string, len(l.Key))
	for i, c := range l.KeyColumns() {
		parts[i] = source + "." + Ident(c.Name) + " " + c.operator("=") + " " + c.constant(key[i])
	}
	return strings.Join(parts, " AND ")
}

func (l *Layout) compare(source string, key []string, op string) string {
	columns := l.KeyColumns()
	refs, values := make([]string, len(columns)), make([]string, len(columns))
	own := false
	for i, c := range columns {
		refs[i] = source + "." + Ident(c.Name)
		values[i] = c.constant(key[i])
		own = own || c.Operators != "" || c.Comparisons != nil
	}
	if !own {
		// A row comparison, which an index on the key answers as one range.
		return "ROW(" + strings.Join(refs, ", ") + ") " + Column{}.operator(op) + " ROW(" + strings.Join(values, ", ") + ")"
	}
	// One row comparison has one operator, so columns of several schemas are spelled
	// out; the first conjunct alone still bounds the index scan.
	strict := strings.TrimSuffix(op, "=")
	last := len(columns) - 1
	sql := refs[last] + " " + columns[last].operator(op) + " " + values[last]
	for i := last - 1; i >= 0; i-- {
		sql = "(" + refs[i] + " " + columns[i].operator(strict) + " " + values[i] + " OR " +
			refs[i] + " " + columns[i].operator("=") + " " + values[i] + " AND (" + sql + "))"
	}
	if last > 0 {
		sql = refs[0] + " " + columns[0].operator(strict+"=") + " " + values[0] + " AND " + sql
	}
	return "(" + sql + ")"
}

// Equals is the column type's own equality as an operator.
func (c Column) Equals() string { return c.operator("=") }

func (c Column) operator(op string) string {
	schema := c.Operators
	if schema == "" {
		schema = "pg_catalog"
	}
	if c.Comparisons != nil {
		op = c.Comparisons[slices.Index(Comparisons, op)]
	}
	return "OPERATOR(" + schema + "." + op + ")"
}

// Read is the SQL that reads the column's text back from an expression of type text,
// by the type's input function, or, for name and xml, by the cast that does the same.
func (c Column) Read(expr string) string {
	switch {
	case c.Byte:
		return "(CASE WHEN length(" + expr + ") = 4 THEN ((get_byte(decode(" + expr + ", 'escape'), 0) + 128) % 256 - 128)::\"char\" ELSE " + expr + "::\"char\" END)::" + c.Type
	case c.Via != "":
		return expr + "::" + c.Via + "::" + c.Type
	}
	return expr + "::" + c.whole()
}

// whole is the type to which a cast never cuts a value.
func (c Column) whole() string {
	if c.Whole != "" {
		return c.Whole
	}
	return c.Type
}

// constant is a value of the column as a typed constant, under the column's collation.
func (c Column) constant(text string) string {
	value := "CAST(" + Literal(text) + " AS " + c.whole() + ")"
	if c.Byte {
		value = c.Read(Literal(text) + "::text")
	}
	if c.Collation != "" {
		value += " COLLATE " + c.Collation
	}
	return value
}

// ValuesFrom is the SQL that reads each column back from the text[] expression.
func (l *Layout) ValuesFrom(expr string) []string {
	parts := make([]string, len(l.Columns))
	for i, c := range l.Columns {
		parts[i] = c.Read(subscript(expr, i))
	}
	return parts
}

func subscript(expr string, i int) string {
	return "(" + expr + ")[" + strconv.Itoa(i+1) + "]"
}

// Names lists the column names, quoted.
func (l *Layout) Names() []string {
	parts := make([]string, len(l.Columns))
	for i, c := range l.Columns {
		parts[i] = Ident(c.Name)
	}
	return parts
}

// Difference says in words what differs between the layout a row was read under
// and the one the table has now, or "".
func (l *Layout) Difference(now *Layout) string {
	var out []string
	for _, c := range l.Columns {
		n, ok := now.Column(c.Name)
		switch {
		case !ok:
			out = append(out, "column "+Ident(c.Name)+" is gone")
		case n.Declared != c.Declared:
			out = append(out, "column "+Ident(c.Name)+" was "+c.Declared+" and is "+n.Declared)
		case !slices.Equal(n.Labels, c.Labels):
			out = append(out, "the labels of "+c.Declared+" have changed")
		}
	}
	for _, c := range now.Columns {
		if _, ok := l.Column(c.Name); !ok {
			out = append(out, "column "+Ident(c.Name)+" is new")
		}
	}
	if !slices.Equal(l.Key, now.Key) {
		out = append(out, "the key was ("+strings.Join(l.Key, ", ")+") and is ("+strings.Join(now.Key, ", ")+")")
	}
	if len(out) == 0 && l.Fingerprint() != now.Fingerprint() {
		out = append(out, "the order or kind of columns has changed")
	}
	return strings.Join(out, "; ")
}
