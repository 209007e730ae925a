package row

import (
	"fmt"
	"slices"
	"strings"
)

// Mapping makes rows of the receiver's table from rows of the source's, as it was
// checked against both sides.
type Mapping struct {
	Key     []string `json:"key"`     // of the receiver, in the order of the source's key
	Columns []Mapped `json:"columns"` // of the receiver that are made here, in its order
	Claims  []Claim  `json:"claims,omitempty"`
}

// Claim is what must be the same text on both sides beside the columns.
type Claim struct {
	Name   string   `json:"name"`
	Source string   `json:"source"` // an expression over the source's row
	Target string   `json:"target"` // and one over the receiver's
	Uses   []string `json:"uses,omitempty"`
}

// column is a claim as a column of the rows that are compared.
func (c Claim) column() Column {
	return Column{Name: "claim: " + c.Name, Type: "text", Declared: "text"}
}

// Mapped is one column of the receiver and what makes it.
type Mapped struct {
	Column          // as it was on the receiver when it was checked
	From   string   `json:"from,omitempty"` // the source's column that it is, "" when Expr makes it
	Expr   string   `json:"expr,omitempty"`
	Uses   []string `json:"uses,omitempty"` // the source's columns that Expr names
}

// KeyOrNil is the receiver's key, nil without a mapping.
func (m *Mapping) KeyOrNil() []string {
	if m == nil {
		return nil
	}
	return m.Key
}

// KeyOf reports whether the receiver's key holds the key of a layout of the source,
// column by column.
func (m *Mapping) KeyOf(source *Layout) bool {
	if len(m.Key) != len(source.Key) {
		return false
	}
	for i, name := range m.Key {
		at := slices.IndexFunc(m.Columns, func(c Mapped) bool { return c.Name == name })
		if at < 0 || m.Columns[at].From != source.Key[i] {
			return false
		}
	}
	return true
}

// On is the mapping with the receiver's columns as they are now: an expression gives what
// such a column takes.
func (m *Mapping) On(receiver *Layout) *Mapping {
	out := *m
	out.Columns = slices.Clone(m.Columns)
	for i, c := range out.Columns {
		if now, ok := receiver.Column(c.Name); ok {
			out.Columns[i].Column = now
		}
	}
	return &out
}

// Altered says which column of the receiver is of another type than the mapping was
// checked for, or "".
func (m *Mapping) Altered(receiver *Layout) string {
	for _, c := range m.Columns {
		if now, ok := receiver.Column(c.Name); ok && now.Declared != c.Declared {
			return fmt.Sprintf("column %s is %s and was %s", Ident(c.Name), now.Declared, c.Declared)
		}
	}
	return ""
}

// Missing returns the first source column that the mapping needs and a layout of the
// source lacks, or "".
func (m *Mapping) Missing(source *Layout) string {
	names := []string{}
	for _, c := range m.Columns {
		names = append(names, c.sources()...)
	}
	for _, c := range m.Claims {
		names = append(names, c.Uses...)
	}
	for _, name := range names {
		if source.index(name) < 0 {
			return name
		}
	}
	return ""
}

// Sources lists the source's columns that one of the receiver's is made of; without a
// mapping it is that of its name.
func (m *Mapping) Sources(column string) []string {
	if m == nil {
		return []string{column}
	}
	for _, c := range m.Columns {
		if c.Name == column {
			return c.sources()
		}
	}
	for _, c := range m.Claims {
		if c.column().Name == column {
			return c.Uses
		}
	}
	return nil
}

func (c Mapped) sources() []string {
	if c.From != "" {
		return []string{c.From}
	}
	return c.Uses
}

// Layout is the receiver's columns that a mapping makes. A column that is the source's
// own has the type that it has there, if source is given, and is not converted.
func (m *Mapping) Layout(source *Layout) *Layout {
	l := &Layout{Key: m.Key}
	for _, c := range m.Columns {
		column := c.Column
		if source != nil && c.From != "" {
			if s, ok := source.Column(c.From); ok {
				s.Name, s.AlwaysIdentity = c.Name, false
				column = s
			}
		}
		l.Columns = append(l.Columns, column)
	}
	return l
}

// Compared is the columns of the rows that are compared: those of a layout, and the claims.
func (m *Mapping) Compared(l *Layout) *Layout {
	out := &Layout{Columns: slices.Clone(l.Columns), Key: l.Key}
	for _, c := range m.Claims {
		out.Columns = append(out.Columns, c.column())
	}
	return out
}

// Statement is the one statement that makes the receiver's table of the source's, where
// both are in one database. Writers of the source wait until it is done: what it has read
// is not overtaken by a change that the triggers deliver.
func (m *Mapping) Statement(source, target string) string {
	var columns, values, set, key []string
	for _, c := range m.Columns {
		value := c.value()
		if c.From != "" {
			value = "source." + Ident(c.From)
		}
		columns, values = append(columns, Ident(c.Name)), append(values, value)
		if !c.AlwaysIdentity && !slices.Contains(m.Key, c.Name) {
			set = append(set, Ident(c.Name)+" = excluded."+Ident(c.Name))
		}
	}
	for _, name := range m.Key {
		key = append(key, Ident(name))
	}
	conflict := "NOTHING"
	if set != nil {
		conflict = "UPDATE SET " + strings.Join(set, ", ")
	}
	return fmt.Sprintf("BEGIN;\nLOCK TABLE %[1]s IN SHARE MODE;\nINSERT INTO %[2]s (%[3]s) OVERRIDING SYSTEM VALUE\nSELECT %[4]s\n  FROM %[1]s AS source\n    ON CONFLICT (%[5]s) DO %[6]s;\nCOMMIT;",
		source, target, strings.Join(columns, ", "), strings.Join(values, ", "), strings.Join(key, ", "), conflict)
}

// Claimed is the SQL of the rows of the receiver's table with what is claimed of them, to
// stand in FROM.
func (m *Mapping) Claimed(table string) string {
	parts := []string{"target.tableoid", "target.*"}
	for _, c := range m.Claims {
		parts = append(parts, "CAST(("+c.Target+") AS text) AS "+Ident(c.column().Name))
	}
	return "(SELECT " + strings.Join(parts, ", ") + " FROM " + table + " AS target)"
}

// Relation is the SQL of the mapped rows of a table of the source's side, to stand in FROM.
func (m *Mapping) Relation(table string) string {
	return m.relation("source.tableoid", table+" AS source")
}

// OfRow is the SQL of the mapped row of the columns that row's list of expressions with
// names makes, to stand in FROM.
func (m *Mapping) OfRow(columns string) string {
	return m.relation("", "(SELECT "+columns+") AS source")
}

func (m *Mapping) relation(first, from string) string {
	var parts []string
	if first != "" {
		parts = append(parts, first)
	}
	for _, c := range m.Columns {
		if c.From != "" {
			parts = append(parts, "source."+Ident(c.From)+" AS "+Ident(c.Name))
			continue
		}
		parts = append(parts, c.value()+" AS "+Ident(c.Name))
	}
	for _, c := range m.Claims {
		parts = append(parts, "CAST(("+c.Source+") AS text) AS "+Ident(c.column().Name))
	}
	return "(SELECT " + strings.Join(parts, ", ") + " FROM " + from + ")"
}

// value is the expression as the receiver would store it, where it does: what is too
// long for the column stays as it is, because the table refuses it and a cast would cut it.
func (c Mapped) value() string {
	whole, collate := c.whole(), ""
	switch {
	case c.Parts:
		return "CAST(CAST((" + c.Expr + ") AS text) AS " + c.Declared + ")"
	case c.Type == `"char"`:
		return "CAST((" + c.Expr + ") AS " + c.Type + ")"
	}
	switch strings.TrimSuffix(whole, "[]") {
	case "character varying", "bpchar":
		collate = ` COLLATE "C"` // another may hold both for equal
	case `"bit"`, "bit varying":
	default:
		return "CAST((" + c.Expr + ") AS " + c.Declared + ")"
	}
	return "(SELECT CASE WHEN fits" + collate + " = whole" + collate + " THEN fits ELSE whole END FROM (SELECT whole, CAST(CAST(whole AS " + c.Declared + ") AS " + whole + ") AS fits FROM (SELECT CAST((" +
		c.Expr + ") AS " + whole + ") AS whole) AS value) AS value)"
}

// RowFrom is the SQL of a mapped row as text[], from the text[] expression of a row of
// the source under a layout. The types of the columns that expressions name are read.
func (m *Mapping) RowFrom(source *Layout, expr string) string {
	var typed, values []string
	for i, c := range source.Columns {
		if slices.ContainsFunc(m.Columns, func(x Mapped) bool { return slices.Contains(x.Uses, c.Name) }) {
			typed = append(typed, c.Read(subscript(expr, i))+" AS "+Ident(c.Name))
		}
	}
	for _, c := range m.Columns {
		if c.From != "" {
			values = append(values, subscript(expr, source.index(c.From)))
			continue
		}
		values = append(values, c.textOf(c.value()))
	}
	from := ""
	if typed != nil {
		from = " FROM (SELECT " + strings.Join(typed, ", ") + ") AS source"
	}
	return "(SELECT ARRAY[" + strings.Join(values, ", ") + "]::text[]" + from + ")"
}

// CheckExpression reports what keeps text from being one SQL expression that cannot
// end the statement it is put into: what PostgreSQL would read beyond it. Whether it
// means something is for PostgreSQL to say.
func CheckExpression(text string) error {
	var open []byte
	closing := map[byte]byte{'(': ')', '[': ']'}
	for i := 0; i < len(text); i++ {
		c := text[i]
		rest := text[i:]
		switch {
		case c == 0:
			return fmt.Errorf("it has a character of value zero")
		case strings.HasPrefix(rest, "--"), strings.HasPrefix(rest, "/*"):
			return fmt.Errorf("comments are not allowed in it")
		case c == ';':
			return fmt.Errorf("it is one expression: ; is not allowed in it")
		case c == '(' || c == '[':
			open = append(open, closing[c])
		case c == ')' || c == ']':
			if len(open) == 0 || open[len(open)-1] != c {
				return fmt.Errorf("its brackets do not match: %q too many", c)
			}
			open = open[:len(open)-1]
		case c == '\'' || c == '"':
			escapes, doubtful := c == '\'' && escapeString(text[:i]), false
			if escapes {
				doubtful = i > 1 && partOfName(text[i-2])
			}
			n := quoted(text[i+1:], c, escapes && !doubtful)
			if n < 0 {
				return fmt.Errorf("a quote %c in it is not closed", c)
			}
			// 1E'\'' is read in two ways by versions of PostgreSQL.
			if doubtful && strings.Contains(text[i:i+n], `\`) {
				return fmt.Errorf(`write a blank before a quote that holds \`)
			}
			i += n
			// A string goes on in one after a line break, and with it what a backslash means.
			if c == '\'' && i+1 < len(text) {
				next := strings.TrimLeft(text[i+1:], " \t\n\r\f\v")
				if strings.HasPrefix(next, "'") {
					return fmt.Errorf("two strings stand one after the other: write || between them")
				}
			}
		case c == '$':
			if i > 0 && partOfName(text[i-1]) {
				return fmt.Errorf("write names that hold $ in quotes")
			}
			tag := dollarTag(text, i)
			if tag == "" {
				continue
			}
			end := strings.Index(text[i+len(tag):], tag)
			if end < 0 {
				return fmt.Errorf("a quote %s in it is not closed", tag)
			}
			i += end + 2*len(tag) - 1
		}
	}
	if len(open) > 0 {
		return fmt.Errorf("its brackets do not match: %q is missing", open[len(open)-1])
	}
	if strings.TrimSpace(text) == "" {
		return fmt.Errorf("it is empty")
	}
	return nil
}

// quoted returns the index in text of the end of what is quoted, -1 when it has none.
func quoted(text string, quote byte, backslashes bool) int {
	for i := 0; i < len(text); i++ {
		switch {
		case backslashes && text[i] == '\\':
			i++
		case text[i] == quote && i+1 < len(text) && text[i+1] == quote:
			i++
		case text[i] == quote:
			return i + 1
		}
	}
	return -1
}

// escapeString reports whether a string that follows before may be written E'…', in
// which a backslash means something.
func escapeString(before string) bool {
	n := len(before)
	return n > 0 && (before[n-1] == 'e' || before[n-1] == 'E')
}

// dollarTag returns the $tag$ that opens a quote at text[i], or "".
func dollarTag(text string, i int) string {
	for n := i + 1; n < len(text); n++ {
		switch {
		case text[n] == '$':
			return text[i : n+1]
		case !partOfName(text[n]) || n == i+1 && text[n] >= '0' && text[n] <= '9':
			return ""
		}
	}
	return ""
}

func partOfName(c byte) bool {
	return c == '_' || c == '$' || c >= 0x80 || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}
