package cli

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/proof"
)

const ranOut = `{"id":7,"site":"shop","table":"public.orders","from":"a","to":"b","mode":"full","of":null,"state":"FINISHED","verdict":"DIFFERENT","clean":false,` +
	`"coverage":1,"missed":0,"percent":100,"leaves":{"total":44,"equal":43,"different":1},"rows":{"source":220000},"keys":{"missing":2,"different":1,"open":3},` +
	`"root":"cafe","excluded":[],"requested_by":"ann","requested_at":"2026-01-01T00:00:00Z"}`

func TestReconcileCommands(t *testing.T) {
	noEnvironment(t)
	equal := strings.NewReplacer("DIFFERENT", "EQUAL", `"missing":2,"different":1,"open":3`, `"open":0`).Replace(ranOut)
	for _, c := range []struct {
		name, args string
		routes     map[string]any
		status     int
		out, errs  []string
		asked      string
	}{{
		name: "start", args: "reconcile --site shop --table public.orders --from a --mode sampled --sample 9",
		routes: map[string]any{"POST /sites/shop/reconciliations": ranOut},
		out:    []string{"reconciliation 7: full of public.orders from a to b\n"}, errs: []string{"backfill reconcile show 7"},
		asked: `POST /sites/shop/reconciliations {"table":"public.orders","from":"a","mode":"sampled","sample":9}`,
	}, {
		name: "watched to a difference fails", args: "reconcile --site shop --table public.orders --from a --watch", status: Failed,
		routes: map[string]any{"POST /sites/shop/reconciliations": ranOut, "GET /reconciliations/7": ranOut},
		out:    []string{"FINISHED  DIFFERENT  44 leaves, 43 equal  2 missing  1 different\n"},
		errs:   []string{"backfill reconcile repair 7", "the verdict is DIFFERENT"},
	}, {
		name: "watched to equality succeeds", args: "reconcile show 7 --watch", routes: map[string]any{"GET /reconciliations/7": equal},
		out: []string{"FINISHED  EQUAL"},
	}, {
		name: "show", args: "reconcile show 7", routes: map[string]any{"GET /reconciliations/7": ranOut},
		out: []string{"verdict     DIFFERENT\n", "100 % of 220,000 rows", "3 open, 0 repaired"},
	}, {
		name: "keys", args: "reconcile keys 7 --kind different",
		routes: map[string]any{"GET /reconciliations/7/keys": `{"data":[{"n":5,"kind":"different","state":"open","key":["3"],"source":{"id":"3","a":"x"},"receiver":{"id":"3","a":null},"columns":["a"],"cause":"never captured"}],"next_cursor":null}`},
		out:    []string{"5  3    different  open   never captured  a: NULL → x"},
		asked:  "GET /reconciliations/7/keys?kind=different&limit=50 ",
	}, {
		name: "repair", args: "reconcile repair 7 --key 5 --note read", routes: map[string]any{"POST /reconciliations/7/repair": strings.Replace(ranOut, `"id":7`, `"id":8`, 1)},
		out: []string{"reconciliation 8"}, asked: `POST /reconciliations/7/repair {"keys":[5],"note":"read"}`,
	}, {
		name: "waive", args: "reconcile waive 7 --note known", routes: map[string]any{"POST /reconciliations/7/waive": ranOut},
		out: []string{"0 waived, 3 still open"}, asked: `POST /reconciliations/7/waive {"note":"known"}`,
	}, {
		name: "one is open", args: "reconcile --site shop --table public.orders --from a", status: Refused,
		routes: map[string]any{"POST /sites/shop/reconciliations": refusal(409, "conflict", "reconciliation 7 of this table and direction is open")},
	}, {
		name: "schedule", args: "reconcile schedule --site shop --table public.orders --from a --every 24h",
		routes: map[string]any{"PUT /sites/shop/tables/public.orders/schedule": `{"every_seconds":86400,"mode":"full"}`},
		out:    []string{"public.orders is reconciled (full) every 1d\n"}, asked: `PUT /sites/shop/tables/public.orders/schedule {"from":"a","every_seconds":86400}`,
	}, {
		name: "schedule needs to know", args: "reconcile schedule --site shop --table public.orders --from a", status: Misused, errs: []string{"--every TIME or --off"},
	}} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t, c.routes)
			t.Setenv("BACKFILL_API", f.URL)
			t.Setenv("BACKFILL_TOKEN", secret)
			var out, errs bytes.Buffer
			status := Run(t.Context(), strings.Fields(c.args), &out, &errs, &struct {
				Reconcile Reconcile `cmd:""`
			}{})
			require.Equal(t, c.status, status, "%s%s", &out, &errs)
			for _, want := range c.out {
				require.Contains(t, out.String(), want)
			}
			for _, want := range c.errs {
				require.Contains(t, errs.String(), want)
			}
			if c.asked != "" {
				last := f.seen()[len(f.seen())-1]
				require.Equal(t, sorted(t, c.asked), sorted(t, last.method+" "+last.target+" "+last.body))
			}
		})
	}
}

func TestVerifyCertificate(t *testing.T) {
	noEnvironment(t)
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	public := proof.PublicKey(key.Public().(ed25519.PublicKey))
	signed, err := proof.Sign(key, map[string]any{"reconciliation": 7, "table": "public.orders", "from": "a", "to": "b", "mode": "full", "verdict": "EQUAL",
		"closed_at": "2026-01-01T00:00:00Z", "rows": map[string]any{"source": 1000, "covered": 1000}})
	require.NoError(t, err)
	text, err := json.Marshal(signed)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "certificate.json")
	require.NoError(t, os.WriteFile(file, text, 0o600))
	verify := func(args ...string) (int, string) {
		var out bytes.Buffer
		return Run(t.Context(), append([]string{"verify-certificate"}, args...), &out, &out, &struct {
			VerifyCertificate VerifyCertificate `cmd:"" name:"verify-certificate"`
		}{}), out.String()
	}
	status, out := verify(file, "--key", public)
	require.Equal(t, OK, status, out)
	require.Contains(t, out, "valid: reconciliation 7 (full) of public.orders from a to b")
	require.Contains(t, out, "verdict EQUAL, 1,000 of 1,000 rows covered")

	f := newFake(t, map[string]any{"GET /certificate-key": `{"key":"` + public + `"}`})
	status, out = verify(file, "--api", f.URL, "--token", secret)
	require.Equal(t, OK, status, out)

	require.NoError(t, os.WriteFile(file, bytes.Replace(text, []byte("EQUAL"), []byte("DIFFERENT"), 1), 0o600))
	status, out = verify(file, "--key", public)
	require.Equal(t, Failed, status)
	require.Contains(t, out, "not valid")
}
