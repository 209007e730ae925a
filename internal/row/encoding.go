package row

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Normaliser is the version of the rules by which Encoding makes values of the two
// sides comparable. Hashes of two versions cannot be compared.
const Normaliser = 2

// Encoding says how rows of two tables are compared: column by column, each as text
// under the pinned settings, in which what the receiver stores when it is sent the
// source's value is the same text on both sides.
//
// Where a column has one declared type on both sides the text is the type's output,
// byte for byte. Where the types differ, the source's value is brought to the form
// the receiver would give it, and what then still is a matter of spelling (trailing
// zeros of a numeric, blanks at the end of a char(n), the order of a json object) is
// taken out on both.
//
// For their hash, rows are encoded as bytes, in which the commonest types need not be
// printed. Rows of the same bytes have the same text.
type Encoding struct {
	Columns          []string // compared, in the order of the encoding
	source, receiver []compared
}

// compared is the SQL of a column of one side, with a hole for the row.
type compared struct{ text, bytes string }

// hole is in no name of a column.
const hole = "\x00"

func ref(c Column) string { return hole + "." + Ident(c.Name) }

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
func (e *Encoding) Source(alias string) string { return texts(e.source, alias) }

// Receiver is the SQL of a receiver's row as text[].
func (e *Encoding) Receiver(alias string) string { return texts(e.receiver, alias) }

// SourceBytes is the SQL of a source row as bytea, and ReceiverBytes of a receiver's:
// the number of columns, then each column's type, length (-1 for NULL) and value.
func (e *Encoding) SourceBytes(alias string) string { return bytes(e.source, alias) }

// ReceiverBytes is the SQL of a receiver's row as bytea.
func (e *Encoding) ReceiverBytes(alias string) string { return bytes(e.receiver, alias) }

func texts(columns []compared, alias string) string {
	return "ARRAY[" + list(columns, alias, func(c compared) string { return c.text }) + "]::text[]"
}

func bytes(columns []compared, alias string) string {
	return "record_send(ROW(" + list(columns, alias, func(c compared) string { return c.bytes }) + "))"
}

func list(columns []compared, alias string, of func(compared) string) string {
	parts := make([]string, len(columns))
	for i, c := range columns {
		parts[i] = strings.ReplaceAll(of(c), hole, alias)
	}
	return strings.Join(parts, ", ")
}

// sent are the types whose values are hashed in the form that the type's send function
// gives them: PostgreSQL's own, under the same number everywhere, of which values of
// different texts have different forms that depend on no setting and no machine. All
// others are hashed as text. Of double precision there are several forms of NaN.
var sent = map[string]string{"smallint": "int2", "integer": "int4", "bigint": "int8", "boolean": "bool", "numeric": "numeric", "date": "date",
	"timestamp without time zone": "timestamp", "timestamp with time zone": "timestamptz", "time without time zone": "time",
	"uuid": "uuid", "bytea": "bytea", "json": "json", "jsonb": "jsonb", "bpchar": "bpchar"}

var scale = regexp.MustCompile(`^numeric\(\d+,(-?\d+)\)$`)

// pair is the SQL that makes a column of the two sides comparable.
func pair(s, r Column) (source, receiver compared) {
	bytes := func(c Column, typ string) string { return "CAST(" + ref(c) + " AS pg_catalog." + typ + ")" }
	a, b := pairText(s, r)
	source, receiver = compared{a, a}, compared{b, b}
	integer := func(c Column) bool { return slices.Contains([]string{"smallint", "integer", "bigint"}, c.Type) }
	switch typ := sent[s.Type]; {
	case s.Declared == r.Declared && s.Type == r.Type && typ != "":
		source.bytes, receiver.bytes = bytes(s, typ), bytes(r, typ)
	case integer(s) && integer(r):
		source.bytes, receiver.bytes = bytes(s, "int8"), bytes(r, "int8")
	}
	return source, receiver
}

func pairText(s, r Column) (source, receiver string) {
	plain := func(c Column) string { return c.Text(hole) }
	as := func(c Column, typ string) string { return "CAST(" + ref(c) + " AS " + typ + ")::text" }
	source, receiver = plain(s), plain(r)
	if s.Declared == r.Declared {
		return source, receiver
	}
	both := func(types ...string) bool {
		return slices.Contains(types, s.whole()) && slices.Contains(types, r.whole())
	}
	either := func(types ...string) bool {
		return slices.Contains(types, s.whole()) || slices.Contains(types, r.whole())
	}
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
	case either("bpchar") && both("bpchar", "text", "character varying"):
		return "rtrim(" + source + ", ' ')", "rtrim(" + receiver + ", ' ')"
	}
	return source, receiver
}
