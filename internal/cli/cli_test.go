package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/api/client"
	"backfill/internal/backfill"
)

// grammar has the commands of this package as main.go has them.
type grammar struct {
	Site    Site    `cmd:""`
	Table   Table   `cmd:""`
	Gate    Gate    `cmd:""`
	Request Request `cmd:""`
	List    List    `cmd:""`
	Show    Show    `cmd:""`
	Watch   Watch   `cmd:""`
	Rows    Rows    `cmd:""`
	Approve Approve `cmd:""`
	Reject  Reject  `cmd:""`
	Pause   Pause   `cmd:""`
	Resume  Resume  `cmd:""`
	Cancel  Cancel  `cmd:""`
	Queue   Queue   `cmd:""`
	History History `cmd:""`
	Audit   Audit   `cmd:""`
	Local   local   `cmd:""`
}

// local stands for the commands that main.go adds.
type local struct{ Code string }

func (l *local) Run(_ context.Context, out io.Writer) error {
	fmt.Fprintln(out, "ran")
	if l.Code == "" {
		return nil
	}
	return &backfill.Error{Code: backfill.Code(l.Code), Message: "no", Fields: []backfill.FieldError{{Field: "x", Message: "is wrong"}},
		Cause: fmt.Errorf("postgres://u:hidden@h/d\nsecond line")}
}

const secret = "bf_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"

// fake is an API that answers what it is told to and remembers what it was asked.
type fake struct {
	*httptest.Server
	mux http.ServeMux

	mu    sync.Mutex
	calls []call
}

type call struct{ method, target, key, body string }

func newFake(t *testing.T, routes map[string]any) *fake {
	f := &fake{}
	for pattern, answer := range routes {
		f.on(pattern, answer)
	}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		f.mu.Lock()
		f.calls = append(f.calls, call{r.Method, strings.TrimPrefix(r.URL.RequestURI(), "/api/v1"), r.Header.Get("Idempotency-Key"), string(body)})
		f.mu.Unlock()
		if r.Header.Get("Authorization") != "Bearer "+secret {
			refuse(w, 401, "unauthorized", "the token is wrong or revoked")
			return
		}
		f.mux.ServeHTTP(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

// on answers a pattern such as "GET /sites" by a handler, or with a JSON text.
func (f *fake) on(pattern string, answer any) {
	method, path, _ := strings.Cut(pattern, " ")
	handler, ok := answer.(func(http.ResponseWriter, *http.Request))
	if !ok {
		handler = func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, answer.(string)+"\n")
		}
	}
	f.mux.HandleFunc(method+" /api/v1"+path, handler)
}

// sorted is a call whose body has its members in the order of their names.
func sorted(t *testing.T, asked string) string {
	at := strings.Index(asked, " {")
	if at < 0 {
		return asked
	}
	dec := json.NewDecoder(strings.NewReader(asked[at:]))
	dec.UseNumber()
	var body any
	require.NoError(t, dec.Decode(&body))
	raw, err := json.Marshal(body)
	require.NoError(t, err)
	return asked[:at+1] + string(raw)
}

func (f *fake) seen() []call {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]call(nil), f.calls...)
}

func refuse(w http.ResponseWriter, status int, kind, detail string, fields ...string) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	p := map[string]any{"type": "urn:backfill:problem:" + kind, "title": "No", "status": status, "detail": detail}
	var errs []map[string]string
	for i := 0; i < len(fields); i += 2 {
		errs = append(errs, map[string]string{"field": fields[i], "message": fields[i+1]})
	}
	p["errors"] = errs
	if kind == "conflict" {
		p["request"] = 7
	}
	json.NewEncoder(w).Encode(p)
}

func refusal(status int, kind, detail string, fields ...string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) { refuse(w, status, kind, detail, fields...) }
}

// run runs a command line in process.
func run(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	status = Run(ctx, args, &out, &errs, &grammar{})
	require.NotContains(t, out.String()+errs.String(), secret)
	return status, out.String(), errs.String()
}

// noEnvironment keeps the variables of whoever runs the tests out of them.
func noEnvironment(t *testing.T) {
	for _, name := range []string{"BACKFILL_API", "BACKFILL_TOKEN", "BACKFILL_STATE"} {
		t.Setenv(name, "") // so that it is put back
		os.Unsetenv(name)
	}
	t.Setenv("XDG_STATE_HOME", t.TempDir())
}

const (
	oneSite = `{"data":[{"name":"shop","sides":[{"name":"a","agent":"h:1","seen_at":"2026-01-01T00:00:00Z","database":"db","problem":null},` +
		`{"name":"b","agent":null,"seen_at":null,"database":null,"problem":null}],"lag":[{"from":"a","to":"b","waiting":1200,"oldest":null,"applied_at":null}]}],"next_cursor":null}`
	onePanel = `{"data":[{"table":"public.orders","active":true,"create":true,"update":true,"delete":false,"captured_from":["a"],"apply_order":3,` +
		`"from":"a","to":"b","key":["id"],"source_rows":1000000,"receiver_rows":null,"counted_at":null,"estimated":true,"capture":{"ok":true},` +
		`"lag":{"waiting":12},"backfill":{"state":null,"id":null,"can_request":false,"conditions":[` +
		`{"name":"active","ok":true,"message":"the table is active"},{"name":"behind","ok":false,"message":"the rows have not been counted"}]}}],"next_cursor":null}`
	waiting = `{"id":7,"site":"shop","table":"public.orders","from":"a","to":"b","mode":"full","key":null,"state":"AWAITING_REVIEW","revision":3,` +
		`"staged":600000,"expected":1000000,"effects":{"insert":599000,"overwrite":1000,"identical":0,"unknown":0},"requested_by":"ann",` +
		`"requested_at":"2026-01-01T00:00:00Z","request_note":"after the \u001b[31mmove","reviewed_by":null,"console_url":null,"eta":null,` +
		`"links":{"self":"/api/v1/backfills/7","review":"http://host/backfills/7"}}`
)

func in(state string) string { return strings.Replace(waiting, "AWAITING_REVIEW", state, 1) }

func TestCommands(t *testing.T) {
	noEnvironment(t)
	for _, c := range []struct {
		name   string
		args   string // split at spaces; · stands for a space
		routes map[string]any
		status int
		out    []string // what standard output holds
		errs   []string // what standard error holds
		asked  string   // the last call: method, target and body
	}{{
		name: "request with everything given", args: "request --site shop --table public.orders --from a --note why·not",
		routes: map[string]any{"POST /sites/shop/backfills": in("PENDING")},
		out:    []string{"request 7: backfill all rows of public.orders from a to b\n"},
		errs:   []string{"backfill watch 7"},
		asked:  `POST /sites/shop/backfills {"table":"public.orders","from":"a","note":"why not"}`,
	}, {
		name: "request takes what there is only one of, and says so", args: "request",
		routes: map[string]any{"GET /sites": oneSite, "GET /sites/shop/tables": onePanel, "POST /sites/shop/backfills": in("PENDING")},
		errs:   []string{"site shop (the only one)\n", "table public.orders (the only one)\n", "side a (the only one)\n"},
		asked:  `POST /sites/shop/backfills {"table":"public.orders","from":"a"}`,
	}, {
		name: "request does not choose between several", args: "request", status: Misused,
		routes: map[string]any{"GET /sites": `{"data":[{"name":"y"},{"name":"x"}]}`},
		errs:   []string{"backfill: which site? give --site, one of: x, y\n"},
	}, {
		name: "request without a site there", args: "request", status: Misused,
		routes: map[string]any{"GET /sites": `{"data":[]}`}, errs: []string{"backfill site add"},
	}, {
		name: "request of a table that is not captured", args: "request --site shop --table public.x", status: Misused,
		routes: map[string]any{"GET /sites/shop/tables": onePanel}, errs: []string{"table public.x of site shop is captured from no side"},
	}, {
		name: "request of a row by values", args: `request --site shop --table t.t --from a --key=-5 --key x,y`,
		routes: map[string]any{"POST /sites/shop/backfills": in("PENDING")},
		asked:  `POST /sites/shop/backfills {"table":"t.t","from":"a","key":["-5","x,y"]}`,
	}, {
		name: "request of a row by an object keeps numbers", args: `request --site shop --table t.t --from a --key {"id":90071992547409931}`,
		routes: map[string]any{"POST /sites/shop/backfills": in("PENDING")},
		asked:  `POST /sites/shop/backfills {"table":"t.t","from":"a","key":{"id":90071992547409931}}`,
	}, {
		name: "request of a row by bad JSON", args: `request --site shop --table t.t --from a --key {id:1}`, status: Misused,
		errs: []string{"--key {id:1} is not JSON"},
	}, {
		name: "request refused names each condition", args: "request --site shop --table t.t --from a", status: Refused,
		routes: map[string]any{"POST /sites/shop/backfills": refusal(422, "refused", "the table cannot be backfilled now: not active", "active", "not active", "capture", "not installed")},
		errs:   []string{"backfill: the table cannot be backfilled now: not active\n  capture: not installed\n"},
	}, {
		name: "a second request names the open one", args: "request --site shop --table t.t --from a", status: Refused,
		routes: map[string]any{"POST /sites/shop/backfills": refusal(409, "conflict", "request 7 is open")},
		errs:   []string{"backfill: request 7 is open\n  see backfill show 7\n"},
	}, {
		name: "invalid input is wrong use", args: "request --site shop --table t.t --from a", status: Misused,
		routes: map[string]any{"POST /sites/shop/backfills": refusal(422, "invalid", "key: is wrong", "key", "is wrong")},
		errs:   []string{"backfill: key: is wrong\n"},
	}, {
		name: "malformed is wrong use", args: "show 7", status: Misused,
		routes: map[string]any{"GET /backfills/7": refusal(400, "malformed", "no")},
	}, {
		name: "not allowed is refused", args: "cancel 7", status: Refused,
		routes: map[string]any{"POST /backfills/7/cancel": refusal(403, "forbidden", "cancelling needs role requester")},
	}, {
		name: "not found is failed", args: "show 7", status: Failed,
		routes: map[string]any{"GET /backfills/7": refusal(404, "not_found", "no request 7")}, errs: []string{"backfill: no request 7\n"},
	}, {
		name: "away is failed", args: "pause 7", status: Failed,
		routes: map[string]any{"POST /backfills/7/pause": refusal(503, "unavailable", "Temporal is away: nothing was decided, try again")},
	}, {
		name: "a wrong token", args: "show 7 --token wrong", status: Failed, errs: []string{"the token is wrong or revoked\n  give a valid token"},
	}, {
		name: "a proxy's error page", args: "show 7", status: Failed,
		routes: map[string]any{"GET /backfills/7": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "<h1>bad", http.StatusBadGateway) }},
		errs:   []string{"backfill: the API answered 502 Bad Gateway\n"},
	}, {
		name: "something else than the API", args: "show 7", status: Failed,
		routes: map[string]any{"GET /backfills/7": "<html>"}, errs: []string{"is that Backfill's address?"},
	}, {
		name: "a redirect is not followed", args: "show 7", status: Failed,
		routes: map[string]any{"GET /backfills/7": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) }},
		errs:   []string{"302 Found"},
	}, {
		name: "show", args: "show 7", routes: map[string]any{"GET /backfills/7": waiting},
		out: []string{"request 7: backfill all rows of public.orders from a to b, site shop\n", "AWAITING_REVIEW, revision 3\n", "600,000 of 1,000,000 expected",
			"599,000 insert, 1,000 overwrite", "http://host/backfills/7", `after the \x1b[31mmove`},
	}, {
		name: "show for scripts is verbatim", args: "show 7 --json", routes: map[string]any{"GET /backfills/7": waiting}, out: []string{"=" + waiting + "\n"},
	}, {
		name: "list", args: "list --site shop --state failed,awaiting_review --table public.orders",
		routes: map[string]any{"GET /backfills": `{"data":[` + waiting + `],"next_cursor":null}`},
		out:    []string{"ID  SITE  TABLE          DIRECTION  STATE             STAGED  RELEASED", " 7  shop  public.orders  a → b      AWAITING_REVIEW  600,000         0"},
		asked:  "GET /backfills?limit=50&site=shop&state=FAILED&state=AWAITING_REVIEW&table=public.orders ",
	}, {
		name: "list of nothing", args: "list", routes: map[string]any{"GET /backfills": `{"data":[],"next_cursor":null}`}, out: []string{"="}, errs: []string{"none\n"},
	}, {
		name: "list of a state that is none", args: "list --state /tmp", status: Misused, errs: []string{"no state of a request", "--state-dir", "see backfill list --help"},
	}, {
		name: "rows", args: "rows 7 --effect overwrite --limit 2",
		routes: map[string]any{"GET /backfills/7": strings.Replace(waiting, `"unknown":0`, `"unknown":1200`, 1), "GET /backfills/7/rows": `{"data":[` +
			`{"key":["1"],"row":{"z":"1","a":null,"m":"x, y"},"effect":"insert","receiver":null,"changed":[],"superseded":false},` +
			`{"key":["2"],"row":{"z":"2","a":"new"},"effect":"overwrite","receiver":{"z":"2","a":""},"changed":["a"],"superseded":true}],"next_cursor":"c","revision":3}`},
		out:   []string{"1    insert                 z=1, a=NULL, m='x, y'\n", "2    overwrite, superseded  a: '' → new\n"},
		errs:  []string{"there are more", "1,200 rows not judged yet: they may belong here too\n", "revision 3\n"},
		asked: "GET /backfills/7/rows?effect=overwrite&limit=2 ",
	}, {
		name: "approve of the present revision says which", args: "approve 7 --skip-identical",
		routes: map[string]any{"GET /backfills/7": waiting, "POST /backfills/7/approve": in("RELEASING")},
		out:    []string{"approved request 7 at revision 3: 600,000 staged rows of public.orders go to b"}, errs: []string{"deciding revision 3: 600,000 staged rows, AWAITING_REVIEW"},
		asked: `POST /backfills/7/approve {"revision":3,"skip_identical":true}`,
	}, {
		name: "approve of a revision that was read", args: "approve 7 --revision 2 --note fine", status: Refused,
		routes: map[string]any{"POST /backfills/7/approve": refusal(409, "conflict", "request 7 stands at revision 3")},
		asked:  `POST /backfills/7/approve {"revision":2,"note":"fine"}`,
	}, {
		name: "reject", args: "reject 7 --note wrong·rows", routes: map[string]any{"GET /backfills/7": waiting, "POST /backfills/7/reject": in("REJECTED")},
		out: []string{"rejected request 7 at revision 3"}, asked: `POST /backfills/7/reject {"revision":3,"note":"wrong rows"}`,
	}, {
		name: "reject needs a note", args: "reject 7", status: Misused, errs: []string{"missing flags: --note=TEXT\n  see backfill reject --help\n"},
	}, {
		name: "resume", args: "resume 7", routes: map[string]any{"POST /backfills/7/resume": in("IN_PROGRESS")}, out: []string{"resumed request 7, IN_PROGRESS 0 %"},
		asked: "POST /backfills/7/resume {}",
	}, {
		name: "site list is the default", args: "site", routes: map[string]any{"GET /sites": oneSite}, out: []string{"shop  a, b     1,200  a seen", "b never seen"},
	}, {
		name: "site show", args: "site show shop", routes: map[string]any{"GET /sites/shop": strings.TrimSuffix(strings.TrimPrefix(oneSite, `{"data":[`), `],"next_cursor":null}`)},
		out: []string{"SIDE  AGENT  SEEN", "a → b        1,200  –       never"},
	}, {
		name: "site add", args: "site add shop --side a --side b", routes: map[string]any{"POST /sites": `{"name":"shop"}`},
		out: []string{"added site shop with sides a and b"}, asked: `POST /sites {"name":"shop","sides":["a","b"]}`,
	}, {
		name: "site add with one side", args: "site add shop --side a", status: Misused,
	}, {
		name: "table list", args: "table --site shop", routes: map[string]any{"GET /sites/shop/tables": onePanel},
		out: []string{"public.orders  a → b      ~1,000,000         –  never         12  no: the rows have not been counted"},
	}, {
		name: "table show by another spelling", args: `table show --site shop "public"."orders"`, routes: map[string]any{"GET /sites/shop/tables": onePanel},
		out: []string{"active, sends create, update from a, apply order 3", "yes  the table is active", "no   the rows have not been counted"},
	}, {
		name: "table show of another", args: "table show --site shop public.x", status: Failed, routes: map[string]any{"GET /sites/shop/tables": onePanel},
	}, {
		name: "table set changes only what is given", args: `table set --site shop "Order·Items"."select" --no-delete --active --from a`,
		routes: map[string]any{"PUT /sites/shop/tables/{table}": `{"table":"t.t","active":true,"captured_from":[]}`}, out: []string{"table t.t: active, sends nothing from nothing"},
		asked: `PUT /sites/shop/tables/%22Order%20Items%22.%22select%22 {"active":true,"delete":false,"captured_from":["a"]}`,
	}, {
		name: "table remove", args: `table remove --site shop t.t`, routes: map[string]any{"DELETE /sites/shop/tables/{table}": `{"table":"t.t"}`},
		out: []string{"removed table t.t from site shop: run backfill setup"}, asked: `DELETE /sites/shop/tables/t.t `,
	}, {
		name: "queue", args: "queue list --site shop --state held --key 1 --key 2",
		routes: map[string]any{"GET /sites/shop/queue": `{"data":[{"seq":1234,"table":"t.t","from":"a","op":"update","key":["1","2"],"request":null,"state":"held","reason":"no\nparent"}]}`},
		out:    []string{`1234  t.t    a     update  1, 2  held   never   no\nparent`},
		asked:  "GET /sites/shop/queue?key=1&key=2&limit=50&state=held ",
	}, {
		name: "queue retry", args: "queue retry 12 --site shop", routes: map[string]any{"POST /sites/shop/queue/12/retry": `{"seq":12,"wish":"retry"}`},
		out: []string{"change 12 of site shop will be tried again"}, asked: "POST /sites/shop/queue/12/retry ",
	}, {
		name: "queue skip", args: "queue skip 12", routes: map[string]any{"GET /sites": oneSite, "POST /sites/shop/queue/12/skip": `{"seq":12,"wish":"skip"}`},
		out: []string{"change 12 of site shop will be skipped"},
	}, {
		name: "history", args: "history --site shop --limit 3", routes: map[string]any{"GET /sites/shop/history": `{"data":[{"seq":1,"table":"t.t","from":"a","op":"create","key":["1"],"request":7,"state":"applied"}]}`},
		out: []string{"7  applied"}, asked: "GET /sites/shop/history?limit=3 ",
	}, {
		name: "audit", args: "audit", routes: map[string]any{"GET /audit": `{"data":[{"at":"2026-01-01T00:00:00Z","account":"ann","action":"site.create","subject":"shop","detail":{"sides": ["a","b"]}}]}`},
		out: []string{`ann      –     site.create  –     shop     {"sides":["a","b"]}`},
	}, {
		name: "a limit that is none", args: "audit --limit 0", status: Misused,
	}, {
		name: "unknown flag", args: "list --frob", status: Misused, errs: []string{"backfill: unknown flag --frob\n  see backfill list --help\n"},
	}, {
		name: "a token in the wrong place is not repeated", args: "list " + secret, status: Misused,
	}, {
		name: "a bad address", args: "list --api localhost:80 --token x", status: Misused, errs: []string{"write it like http://127.0.0.1:8080"},
	}, {
		name: "help", args: "request --help", out: []string{"Usage: backfill request [flags]"},
	}, {
		name: "another command", args: "local", out: []string{"=ran\n"},
	}, {
		name: "another command refused", args: "local --code refused", status: Refused, errs: []string{"backfill: no: postgres://u:…@h/d; second line\n  x: is wrong\n"},
	}, {
		name: "another command misused", args: "local --code invalid", status: Misused,
	}, {
		name: "another command failed", args: "local --code unavailable", status: Failed,
	}} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t, c.routes)
			t.Setenv("BACKFILL_API", f.URL)
			t.Setenv("BACKFILL_TOKEN", secret)
			args := strings.Fields(c.args)
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "·", " ")
			}
			status, out, errs := run(t, args...)
			require.Equal(t, c.status, status, "stdout: %s\nstderr: %s", out, errs)
			for _, want := range c.out {
				if whole, ok := strings.CutPrefix(want, "="); ok {
					require.Equal(t, whole, out)
				} else {
					require.Contains(t, out, want)
				}
			}
			for _, want := range c.errs {
				require.Contains(t, errs, want)
			}
			if status != OK {
				require.True(t, strings.HasPrefix(errs, "backfill: ") || strings.Contains(errs, "\nbackfill: "), errs)
			}
			if c.asked != "" {
				last := f.seen()[len(f.seen())-1]
				require.Equal(t, sorted(t, c.asked), sorted(t, last.method+" "+last.target+" "+last.body))
				require.Equal(t, last.method == "POST", last.key != "")
			}
		})
	}
}

func TestNoCommandPrintsHelp(t *testing.T) {
	noEnvironment(t)
	status, out, errs := run(t)
	require.Equal(t, Misused, status)
	require.Empty(t, out)
	require.Contains(t, errs, "Usage: backfill <command>")
}

func TestHelpHidesTheEnvironment(t *testing.T) {
	noEnvironment(t)
	t.Setenv("BACKFILL_TOKEN", secret)
	status, out, _ := run(t, "show", "--help")
	require.Equal(t, OK, status)
	require.Contains(t, out, "$BACKFILL_TOKEN")
}

func TestClientFile(t *testing.T) {
	noEnvironment(t)
	f := newFake(t, map[string]any{"GET /backfills/7": waiting})
	dir := t.TempDir()
	write := func(content string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, ClientFile), []byte(content), 0o600))
	}
	file, err := json.Marshal(ClientConfig{API: f.URL, Token: secret})
	require.NoError(t, err)
	write(string(file))

	status, _, errs := run(t, "show", "7", "--state", dir)
	require.Equal(t, OK, status, errs)
	status, _, errs = run(t, "list", "--state-dir", dir)
	require.Equal(t, Failed, status, errs) // found, but this API has no list
	t.Setenv("BACKFILL_STATE", dir)
	status, _, errs = run(t, "show", "7")
	require.Equal(t, OK, status, errs)
	status, _, errs = run(t, "show", "7", "--api", f.URL+"/")
	require.Equal(t, OK, status, errs)

	// The token is this API's, and goes to no other.
	other := newFake(t, nil)
	status, _, errs = run(t, "show", "7", "--api", other.URL)
	require.Equal(t, Misused, status)
	require.Contains(t, errs, "no token for "+other.URL)
	require.Empty(t, other.seen())

	write("{")
	status, _, errs = run(t, "show", "7")
	require.Equal(t, Failed, status)
	require.Contains(t, errs, filepath.Join(dir, ClientFile))
	status, _, errs = run(t, "show", "7", "--api", f.URL, "--token", secret)
	require.Equal(t, OK, status, errs)

	t.Setenv("BACKFILL_STATE", t.TempDir())
	status, _, errs = run(t, "show", "7")
	require.Equal(t, Misused, status)
	require.Contains(t, errs, "no token for http://127.0.0.1:8080")
}

func TestDefaultState(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", "/x")
	require.Equal(t, "/x/backfill", DefaultState())
	t.Setenv("XDG_STATE_HOME", "not/absolute")
	t.Setenv("HOME", "/home/ann")
	want := "/home/ann/.local/state/backfill"
	if os.Geteuid() == 0 {
		want = "/var/lib/backfill"
	}
	require.Equal(t, want, DefaultState())
}

func TestPages(t *testing.T) {
	noEnvironment(t)
	// 450 requests in pages as large as asked for.
	f := newFake(t, map[string]any{"GET /backfills": func(w http.ResponseWriter, r *http.Request) {
		var from, n int
		fmt.Sscan(r.URL.Query().Get("cursor"), &from)
		fmt.Sscan(r.URL.Query().Get("limit"), &n)
		var data []map[string]any
		for i := from; i < min(from+n, 450); i++ {
			data = append(data, map[string]any{"id": i + 1, "state": "FINISHED"})
		}
		var next any
		if from+n < 450 {
			next = fmt.Sprint(from + n)
		}
		json.NewEncoder(w).Encode(map[string]any{"data": data, "next_cursor": next})
	}})
	flags := []string{"--api", f.URL, "--token", secret}
	for _, c := range []struct {
		args         string
		lines, calls int
		more         bool
	}{
		{"list", 50, 1, true},
		{"list --limit 250", 250, 2, true},
		{"list --limit 450", 450, 3, false},
		{"list --all", 450, 3, false},
	} {
		before := len(f.seen())
		status, out, errs := run(t, append(strings.Fields(c.args), flags...)...)
		require.Equal(t, OK, status, errs)
		require.Equal(t, c.lines+1, strings.Count(out, "\n"), "names once, and a line each")
		require.Equal(t, c.calls, len(f.seen())-before)
		require.Equal(t, c.more, strings.Contains(errs, "there are more"))
	}
	_, out, _ := run(t, append([]string{"list", "--all", "--json"}, flags...)...)
	dec := json.NewDecoder(strings.NewReader(out))
	total := 0
	for dec.More() {
		var p client.Page[client.Backfill]
		require.NoError(t, dec.Decode(&p))
		total += len(p.Data)
	}
	require.Equal(t, 450, total)
}

// A connection that breaks is tried again under the same key, so that what was
// done is not done twice.
func TestRetriesUnderOneKey(t *testing.T) {
	noEnvironment(t)
	f := newFake(t, nil)
	n := 0
	f.on("POST /backfills/7/cancel", func(w http.ResponseWriter, r *http.Request) {
		if n++; n < 3 {
			panic(http.ErrAbortHandler)
		}
		io.WriteString(w, in("CANCELLED"))
	})
	status, out, errs := run(t, "cancel", "7", "--api", f.URL, "--token", secret)
	require.Equal(t, OK, status, errs)
	require.Contains(t, out, "cancelled request 7")
	calls := f.seen()
	require.Len(t, calls, 3)
	require.Equal(t, calls[0], calls[2])
	require.Len(t, calls[0].key, 26)

	run(t, "cancel", "7", "--api", f.URL, "--token", secret)
	require.NotEqual(t, calls[0].key, f.seen()[3].key, "another command is another wish")
}

func TestNobodyThere(t *testing.T) {
	noEnvironment(t)
	gone := httptest.NewServer(nil)
	gone.Close()
	status, _, errs := run(t, "show", "7", "--api", gone.URL, "--token", secret)
	require.Equal(t, Failed, status)
	require.Equal(t, 1, strings.Count(errs, "\n"))
	require.Contains(t, errs, "cannot reach the API at "+gone.URL)
	require.Contains(t, errs, "connection refused")
}

func TestInterrupted(t *testing.T) {
	noEnvironment(t)
	ctx, cancel := context.WithCancel(t.Context())
	f := newFake(t, map[string]any{"GET /backfills/7": func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	}})
	var errs bytes.Buffer
	require.Equal(t, Failed, Run(ctx, []string{"show", "7", "--api", f.URL, "--token", secret}, io.Discard, &errs, &grammar{}))
	require.Equal(t, "backfill: interrupted\n", errs.String())
}

func TestOutputThatCannotBeWritten(t *testing.T) {
	noEnvironment(t)
	f := newFake(t, map[string]any{"GET /backfills/7": waiting})
	var errs bytes.Buffer
	require.Equal(t, Failed, Run(t.Context(), []string{"show", "7", "--api", f.URL, "--token", secret}, full{}, &errs, &grammar{}))
	require.Contains(t, errs.String(), "no space left")
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, fmt.Errorf("no space left") }
