package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const notYet = `{"read_new":false,"because":[{"clause":"proof","message":"reconciliation 7 found 1 of 44 leaves different"}],"table":"public.orders","from":"a","to":"b",
	"clauses":[{"name":"backfill","ok":true,"message":"backfill 3 is FINISHED"},{"name":"proof","ok":false,"message":"reconciliation 7 found 1 of 44 leaves different"}],
	"waived":[{"by":"ann","note":"born there","keys":2}],"policy":{"objective":0.0001,"soak_seconds":86400,"proof_age_seconds":3600,"max_lag_seconds":30,"sample_per_minute":60}}`

func TestCutoverCommands(t *testing.T) {
	noEnvironment(t)
	const where = " --site shop --table public.orders --from a"
	for _, c := range []struct {
		name, args, route, answer string
		status                    int
		out                       []string
		asked                     string
	}{
		{"no", "cutover" + where, "GET /sites/shop/tables/public.orders/cutover", notYet, Refused,
			[]string{"may reads move from a to b? no\n", "  yes backfill   backfill 3 is FINISHED\n", "  no  proof      reconciliation 7 found", "waived: 2 keys by ann: born there\n"}, "?from=a"},
		{"yes", "cutover" + where, "GET /sites/shop/tables/public.orders/cutover", strings.ReplaceAll(notYet, "false", "true"), OK, []string{"? yes\n"}, ""},
		{"no as JSON", "cutover --json" + where, "GET /sites/shop/tables/public.orders/cutover", notYet, Refused, []string{`"read_new":false`}, ""},
		{"set", "cutover set --soak 24h --objective 0.001" + where, "PUT /sites/shop/tables/public.orders/cutover", notYet, OK,
			[]string{"public.orders: under 0.01 % mismatches for 1d, a reconciliation no older than 1h, lag no more than 30s, 60 reads sampled a minute\n"}, `{"from":"a","objective":0.001,"soak_seconds":86400}`},
		{"nothing to set", "cutover set" + where, "", "", Misused, nil, ""},
		{"no shadow read", "cutover shadow" + where, "GET /sites/shop/tables/public.orders/shadow", `{"table":"public.orders","since":null}`, OK, []string{"no shadow read was judged yet"}, ""},
		{"shadow reads", "cutover shadow" + where, "GET /sites/shop/tables/public.orders/shadow",
			`{"table":"public.orders","since":"2026-01-01T00:00:00Z","reads":{"match":30000,"stale":4,"mismatch":1,"unknown":0},"rate":0.0000333,"bound":0.000158,"objective":0.0001,
			"odd":[{"at":"2026-01-01T00:00:00Z","key":["44"],"verdict":"mismatch","problem":"","reconciliation":9}]}`, OK,
			[]string{"30,000 match, 4 stale, 1 mismatch", "rate 0.00333 %, at most 0.0158 % at 95 % confidence, the objective is 0.01 %", "44   mismatch  reconciliation 9"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			routes := map[string]any{}
			if c.route != "" {
				routes[c.route] = c.answer
			}
			f := newFake(t, routes)
			t.Setenv("BACKFILL_API", f.URL)
			t.Setenv("BACKFILL_TOKEN", secret)
			var out, errs bytes.Buffer
			status := Run(t.Context(), strings.Fields(c.args), &out, &errs, &struct {
				Cutover Cutover `cmd:""`
			}{})
			require.Equal(t, c.status, status, "%s%s", &out, &errs)
			for _, want := range c.out {
				require.Contains(t, out.String(), want)
			}
			if c.asked != "" {
				last := f.seen()[len(f.seen())-1]
				require.Contains(t, last.target+" "+last.body, c.asked)
			}
		})
	}
}
