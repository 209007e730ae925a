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
	// Labels are an enum's labels in order.
	Labels []string `json:"labels,omitempty"`
	// Function says that the type's cast to text is a function rather than its output
	// function (bool prints true instead of t, bpchar loses its blanks), so that the
	// output function has to be asked for.
	Function bool `json:"function,omitempty"`
	// AlwaysIdentity says GENERATED ALWAYS AS IDENTITY: insertable when overriding, never updatable.
	AlwaysIdentity bool `json:"always_identity,omitempty"`
}

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

// text is the one expression that turns a column into its text, in triggers,
// pushes, walks and comparisons alike. source is an alias.
func (c Column) text(source string) string {
	ref := source + "." + Ident(c.Name)
	if !c.Function {
		return ref + "::text"
	}
	// concat calls the output function, but makes NULL an empty string.
	return "CASE WHEN " + ref + " IS NOT NULL THEN concat(" + ref + ") END"
}

// KeyText is the SQL of a row's key as text[], from a row source of that alias.
func (l *Layout) KeyText(source string) string { return array(l.KeyColumns(), source) }

// RowText is the SQL of a whole row as text[], from a row source of that alias.
func (l *Layout) RowText(source string) string { return array(l.Columns, source) }

func array(columns []Column, source string) string {
	parts := make([]string, len(columns))
	for i, c := range columns {
		parts[i] = c.text(source)
	}
	return "ARRAY[" + strings.Join(parts, ", ") + "]::text[]"
}

// KeyRefs lists the key columns of an alias, for comparing and ordering.
func (l *Layout) KeyRefs(source string) string {
	parts := make([]string, len(l.Key))
	for i, name := range l.Key {
		parts[i] = source + "." + Ident(name)
	}
	return strings.Join(parts, ", ")
}

// KeyFrom is the SQL that reads a key back from the text[] expression.
func (l *Layout) KeyFrom(expr string) []string {
	parts := make([]string, len(l.Key))
	for i, c := range l.KeyColumns() {
		parts[i] = subscript(expr, i) + "::" + c.Type
	}
	return parts
}

// KeyLiteral is a key's values as typed constants, separated by commas.
func (l *Layout) KeyLiteral(key []string) string {
	parts := make([]string, len(key))
	for i, c := range l.KeyColumns() {
		parts[i] = "CAST(" + Literal(key[i]) + " AS " + c.Type + ")"
	}
	return strings.Join(parts, ", ")
}

// KeyEquals is the SQL that compares the key columns of an alias with the
// text[] expression by the type's own equality.
func (l *Layout) KeyEquals(source, expr string) string {
	parts := make([]string, len(l.Key))
	for i, value := range l.KeyFrom(expr) {
		parts[i] = source + "." + Ident(l.Key[i]) + " = " + value
	}
	return strings.Join(parts, " AND ")
}

// ValuesFrom is the SQL that reads each column back from the text[] expression.
func (l *Layout) ValuesFrom(expr string) []string {
	parts := make([]string, len(l.Columns))
	for i, c := range l.Columns {
		parts[i] = subscript(expr, i) + "::" + c.Type
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
