package api

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
)

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
