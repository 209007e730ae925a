package row

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Normaliser is the version of the rules by which Encoding makes values of the two
// sides comparable. Hashes of two versions cannot be compared.
const Normaliser = 1

// Encoding says how rows of two tables are compared: column by column, each as text
// under the pinned settings, in which what the receiver stores when it is sent the
// source's value is the same text on both sides.
//
// Where a column has one declared type on both sides the text is the type's output,
// byte for byte. Where the types differ, the source's value is brought to the form
// the receiver would give it, and what then still is a matter of spelling (trailing
// zeros of a numeric, blanks at the end of a char(n), the order of a json object) is
// taken out on both.
type Encoding struct {
	Columns          []string // compared, in the order of the encoding
	source, receiver []string // SQL of each, with {} for the row
}

// NewEncoding pairs the columns of two layouts by name. Columns only the receiver
// has, and those excluded, are not compared; a column only the source has is an error.
func NewEncoding(source, receiver *Layout, excluded []string) (*Encoding, error) {
	if !slices.Equal(source.Key, receiver.Key) {
		return nil, fmt.Errorf("the key is (%s) on the source and (%s) on the receiver", strings.Join(source.Key, ", "), strings.Join(receiver.Key, ", "))
	}
	e := &Encoding{}
	for _, s := range source.Columns {
		if slices.Contains(excluded, s.Name) {
			continue
		}
		r, ok := receiver.Column(s.Name)
		if !ok {
			return nil, fmt.Errorf("column %s does not exist on the receiver: add it there, or exclude it", Ident(s.Name))
		}
		a, b := pair(s, r)
		e.Columns = append(e.Columns, s.Name)
		e.source, e.receiver = append(e.source, a), append(e.receiver, b)
	}
	return e, nil
}

// Source is the SQL of a source row as text[], and Receiver of a receiver's.
func (e *Encoding) Source(alias string) string { return encoded(e.source, alias) }

// Receiver is the SQL of a receiver's row as text[].
func (e *Encoding) Receiver(alias string) string { return encoded(e.receiver, alias) }

func encoded(columns []string, alias string) string {
	return "ARRAY[" + strings.ReplaceAll(strings.Join(columns, ", "), "{}", alias) + "]::text[]"
}

var scale = regexp.MustCompile(`^numeric\(\d+,(-?\d+)\)$`)

// pair is the SQL that makes a column of the two sides comparable.
func pair(s, r Column) (source, receiver string) {
	plain := func(c Column) string {
		// The braces of the row are put in last, so that a column's name may hold some.
		return strings.ReplaceAll(c.Text("\x00"), "\x00", "{}")
	}
	ref := func(c Column) string { return "{}." + Ident(c.Name) }
	as := func(c Column, typ string) string { return "CAST(" + ref(c) + " AS " + typ + ")::text" }
	source, receiver = plain(s), plain(r)
	if s.Declared == r.Declared {
		return source, receiver
	}
	both := func(types ...string) bool { return slices.Contains(types, s.Type) && slices.Contains(types, r.Type) }
	either := func(types ...string) bool { return slices.Contains(types, s.Type) || slices.Contains(types, r.Type) }
	switch {
	case both("smallint", "integer", "bigint", "numeric"):
		source = "CAST(" + ref(s) + " AS numeric)"
		if m := scale.FindStringSubmatch(r.Declared); m != nil {
			source = "round(" + source + ", " + m[1] + ")"
		}
		return "trim_scale(" + source + ")::text", "trim_scale(CAST(" + ref(r) + " AS numeric))::text"
	case both("timestamp without time zone", "timestamp with time zone"), both("time without time zone"), both("time with time zone"), both("interval"):
		return as(s, r.Declared), receiver
	case both("json", "jsonb"):
		return as(s, "jsonb"), as(r, "jsonb")
	case both("real", "double precision") && r.Type == "real":
		return as(s, "real"), receiver
	case either("character") && either("character", "text", "character varying"):
		return "rtrim(" + source + ", ' ')", "rtrim(" + receiver + ", ' ')"
	}
	return source, receiver
}
