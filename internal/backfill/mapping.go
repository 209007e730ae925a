package backfill

import (
	"fmt"
	"slices"
	"strings"
)

// Mapping says how the receiver's rows are made from the source's, where its table has
// another shape. Expressions are PostgreSQL's own, over the columns of one source row.
type Mapping struct {
	// Source and Target are the tables on the two sides, as schema.table; "" is the name
	// under which the table is configured.
	Source string `json:"source,omitempty"`
	Target string `json:"target,omitempty"`
	// Key lists the target's columns that hold the source's key, in the order of that;
	// nil: those that Columns makes of its columns.
	Key []string `json:"key,omitempty"`
	// Columns has the expression that makes each column of the target. A column with the
	// name of a source column is made of that when it is not listed; UseDefault leaves it
	// to the target.
	Columns map[string]string `json:"columns,omitempty"`
	// Drop lists the source's columns that go nowhere.
	Drop []string `json:"drop,omitempty"`
	// Prove has, by names of one's own, what must hold of every row beside its columns: a
	// mistake in an expression is the same on both sides, and only a claim that is made
	// apart from it finds that.
	Prove map[string]Claim `json:"prove,omitempty"`
}

// Claim says that an expression over the source's row and one over the receiver's give
// the same text.
type Claim struct {
	Source string `json:"source"`
	Target string `json:"target"`
}

// UseDefault as an expression leaves a column to the target's own default.
const UseDefault = "default"

// Check reads the names of a mapping and brings them into the one spelling. What only
// the databases can tell, they are asked.
func (m *Mapping) Check() error {
	var fields []FieldError
	for _, t := range []struct {
		field string
		name  *string
	}{{"mapping.source", &m.Source}, {"mapping.target", &m.Target}} {
		if *t.name == "" {
			continue
		}
		parsed, err := ParseTableName(*t.name)
		if err != nil {
			fields = append(fields, FieldError{t.field, err.Error()})
			continue
		}
		*t.name = parsed.String()
	}
	for column, expr := range m.Columns {
		if column == "" || strings.TrimSpace(expr) == "" {
			fields = append(fields, FieldError{"mapping.columns." + column, "name the target's column, and give the expression that makes it"})
		}
	}
	for name, c := range m.Prove {
		if name == "" || len(name) > 50 || strings.TrimSpace(c.Source) == "" || strings.TrimSpace(c.Target) == "" {
			fields = append(fields, FieldError{"mapping.prove." + name, "name it by 1 to 50 bytes, and give an expression over the source's row and one over the target's"})
		}
	}
	if len(fields) == 0 {
		return nil
	}
	return Unfit(fields)
}

// Unfit is a mapping that cannot be used, for each of these reasons.
func Unfit(fields []FieldError) error {
	slices.SortFunc(fields, func(a, b FieldError) int { return strings.Compare(a.Field, b.Field) })
	parts := make([]string, len(fields))
	for i, f := range fields {
		parts[i] = f.Field + ": " + f.Message
	}
	return &Error{Code: Invalid, Message: "the mapping cannot be used: " + strings.Join(parts, "; "), Fields: fields}
}

// Relation is the name of the table that a side has under this configuration.
func (t *Table) Relation(side string) string {
	switch {
	case t.Mapping == nil:
		return t.Name
	case t.Captures(side):
		return t.Mapping.SourceOf(t.Name)
	}
	return t.Mapping.TargetOf(t.Name)
}

// SourceOf is the source's table of a configuration of that name.
func (m *Mapping) SourceOf(name string) string { return or(m.Source, name) }

// TargetOf is the receiver's table of a configuration of that name.
func (m *Mapping) TargetOf(name string) string { return or(m.Target, name) }

func or(name, otherwise string) string {
	if name == "" {
		return otherwise
	}
	return name
}

// Remapped is why what was read or compared under an earlier mapping does not count.
func Remapped(version int) string {
	return fmt.Sprintf("the mapping of the table was changed to version %d: request another backfill, of which the rows are made by that", version)
}

// Excludes reports whether a mapping says no more than that columns are left out.
func (m *Mapping) Excludes() bool {
	return m.Source == "" && m.Target == "" && len(m.Key) == 0 && len(m.Columns) == 0 && len(m.Prove) == 0
}

// Empty reports whether a mapping says nothing: both sides have the same columns then.
func (m *Mapping) Empty() bool {
	return m.Source == "" && m.Target == "" && len(m.Key) == 0 && len(m.Columns) == 0 && len(m.Drop) == 0 && len(m.Prove) == 0
}
