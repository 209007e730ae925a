package backfill

import (
	"regexp"
	"strings"
)

// TableName is the two parts of a table's name as the catalog holds them.
type TableName struct{ Schema, Name string }

// ParseTableName reads schema.table, each part either as it is in the catalog or
// quoted as in SQL: public.orders, "Order Items"."select". Case is kept; nothing is
// folded, because a name is always read back from what was shown.
func ParseTableName(s string) (TableName, error) {
	schema, rest, ok := cutPart(s)
	if ok && rest != "" {
		var name string
		if name, rest, ok = cutPart(rest[1:]); ok && rest == "" && goodPart(schema) && goodPart(name) {
			return TableName{schema, name}, nil
		}
	}
	return TableName{}, Errorf(Invalid, `table name %q: write schema.table, each part of 1 to 63 bytes and quoted when it holds a dot: public.orders or "Order Items"."select"`, s)
}

func goodPart(s string) bool {
	return s != "" && len(s) <= 63 && !strings.ContainsRune(s, 0)
}

// cutPart takes one name off s; after begins with the dot, or is empty.
func cutPart(s string) (part, after string, ok bool) {
	if !strings.HasPrefix(s, `"`) {
		i := strings.IndexByte(s, '.')
		if i < 0 {
			return s, "", true
		}
		return s[:i], s[i:], true
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		if s[i] != '"' {
			b.WriteByte(s[i])
			continue
		}
		if i+1 < len(s) && s[i+1] == '"' {
			b.WriteByte('"')
			i++
			continue
		}
		after = s[i+1:]
		return b.String(), after, after == "" || after[0] == '.'
	}
	return "", "", false
}

// String is the name as SQL would have it, quoted where it must be. It is the
// one spelling shown, stored and put into addresses.
func (t TableName) String() string { return quoteName(t.Schema) + "." + quoteName(t.Name) }

var plainName = regexp.MustCompile(`^[a-z_][a-z0-9_$]*$`)

func quoteName(s string) string {
	if plainName.MatchString(s) && !reserved[s] {
		return s
	}
	return `"` + strings.ReplaceAll(s, `"`, `""`) + `"`
}

// reserved holds the key words PostgreSQL's quote_ident quotes.
var reserved = func() map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(reservedWords) {
		m[w] = true
	}
	return m
}()

const reservedWords = `
all analyse analyze and any array as asc asymmetric authorization between bigint binary bit boolean both case 
cast char character check coalesce collate collation column concurrently constraint create cross 
current_catalog current_date current_role current_schema current_time current_timestamp current_user dec 
decimal default deferrable desc distinct do else end except exists extract false fetch float for foreign 
freeze from full grant greatest group grouping having ilike in initially inner inout int integer intersect 
interval into is isnull join lateral leading least left like limit localtime localtimestamp national natural 
nchar none normalize not notnull null nullif numeric offset on only or order out outer overlaps overlay 
placing position precision primary real references returning right row select session_user setof similar 
smallint some substring symmetric table tablesample then time timestamp to trailing treat trim true union 
unique user using values varchar variadic verbose when where window with xmlattributes xmlconcat xmlelement 
xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot xmlserialize xmltable
`
