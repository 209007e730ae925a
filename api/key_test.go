package api

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// PostgreSQL judges what we do not know.
func TestKeysOfAnyTypeAreJudgedAtOnce(t *testing.T) {
	w := newWorld(t)
	for typ, keys := range map[string][2]string{
		"double precision":            {`1.5e300`, `"abc"`},
		"pg_catalog.inet":             {`"10.0.0.1/8"`, `"10.0.0.300"`},
		"interval":                    {`"1 day"`, `"a while"`},
		"time without time zone":      {`"24:00:00"`, `"25:00:00"`},
		"date":                        {`"2024-02-29"`, `"2024-02-30"`},
		"timestamp(3) with time zone": {`"2024-03-31 01:30:00+01"`, `"2024-99-99 1:00"`},
		"bytea":                       {`"\\x00ff"`, `"\\x0"`},
		"int4range":                   {`"[1,5)"`, `"[5,1)"`},
		"bigint":                      {`"0x1F"`, `"31st"`}, // newer servers read it
		"public.mood":                 {`"sad"`, ""},
		"regclass":                    {`"no_such_table"`, ""},
	} {
		w.exec(`UPDATE backfill_control.table_side SET key_types = ARRAY[$1]`, typ)
		if keys[1] != "" {
			a := w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","mode":"row","key":[`+keys[1]+`]}`)
			require.Equal(t, 422, a.status, "%s: %s", typ, a.raw)
			require.Contains(t, string(a.raw), "key.id")
		}
		a := w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"public.orders","from":"school","mode":"row","key":[`+keys[0]+`]}`)
		require.Equal(t, 201, a.status, "%s: %s", typ, a.raw)
	}
}

func TestParseKey(t *testing.T) {
	tests := []struct {
		typ, json string
		want      string // "" when it is refused
	}{
		{"bigint", `1`, "1"},
		{"bigint", `"1"`, "1"},
		{"bigint", `" -007 "`, " -007 "},
		{"bigint", `9223372036854775807`, "9223372036854775807"},
		{"bigint", `-9223372036854775808`, "-9223372036854775808"},
		{"bigint", `9223372036854775808`, ""},
		{"bigint", `1e3`, ""},
		{"bigint", `1.5`, ""},
		{"bigint", `"0x1F"`, "0x1F"}, // newer servers read it
		{"bigint", `""`, ""},
		{"bigint", `true`, ""},
		{"int4", `2147483648`, ""},
		{"pg_catalog.int2", `32768`, ""},
		{"smallint", `-32768`, "-32768"},
		{"numeric", `1.50`, "1.50"},
		{"numeric", `1e400`, "1e400"},
		{"numeric", `"NaN"`, "NaN"},
		{"numeric", `"1,5"`, ""},
		{"numeric", `"."`, ""},
		{"uuid", `"A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"`, "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"},
		{"uuid", `"{a0eebc999c0b4ef8bb6d6bb9bd380a11}"`, "{a0eebc999c0b4ef8bb6d6bb9bd380a11}"},
		{"uuid", `"a0eebc99"`, ""},
		{"uuid", `5`, ""},
		{"boolean", `true`, "t"},
		{"boolean", `false`, "f"},
		{"boolean", `"yes"`, "yes"},
		{"boolean", `"maybe"`, ""},
		{"text", `true`, "true"},
		{"text", `1.0`, "1.0"},
		{"date", `"2024-02-30"`, "2024-02-30"}, // wrong, but not surely to us
		{"date", `"infinity"`, "infinity"},
		{"date", `"soon"`, ""},
		{"timestamp with time zone", `"2024-01-01 00:00:00+02"`, "2024-01-01 00:00:00+02"},
		{"timestamptz", `"later"`, ""},
		{"citext", `"x"`, "x"},
		{"text", `null`, ""},
		{"text", `{}`, ""},
		{"text", `"\u0000"`, ""},
	}
	for _, x := range tests {
		p := &backfill.Panel{Table: backfill.Table{Name: "public.t"}, Source: backfill.TableSide{Key: []string{"k"}, KeyTypes: []string{x.typ}}}
		for _, raw := range []string{`[` + x.json + `]`, `{"k":` + x.json + `}`} {
			key, err := parseKey(p, []byte(raw))
			if x.want == "" {
				require.Equal(t, backfill.Invalid, backfill.CodeOf(err), "%s as %s", raw, x.typ)
				require.ErrorContains(t, err, "key.k")
				continue
			}
			require.NoError(t, err, "%s as %s", raw, x.typ)
			require.Equal(t, backfill.Key{x.want}, key)
		}
	}
	p := &backfill.Panel{Source: backfill.TableSide{Key: []string{"a", "b"}}}
	for _, raw := range []string{``, `5`, `"x"`, `null`, `[1]`, `[1,2,3]`, `[1,2] 3`, `{"a":1}`, `{"a":1,"b":2,"c":3}`, `{`} {
		_, err := parseKey(p, []byte(raw))
		require.Equal(t, backfill.Invalid, backfill.CodeOf(err), raw)
	}
}
