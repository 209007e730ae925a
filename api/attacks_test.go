package api

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

// Whatever a name, a key, a filter or a note says, it is never run as SQL: nothing is
// gone, nothing waits, nothing more is shown.
func TestNamesAreNotSQL(t *testing.T) {
	w := newWorld(t)
	id := w.staged(3)
	before := w.tables()
	const sites = "/api/v1/sites/maple/"
	for _, evil := range []string{`'; DROP TABLE backfill_control.site CASCADE; --`, `"; DROP TABLE backfill_control.site CASCADE; --`, `' OR '1'='1`, `1); SELECT pg_sleep(9); --`, `$1; SELECT pg_sleep(9)`,
		`x' UNION SELECT secret FROM backfill_control.token --`, `%' OR true --`, `\'; SELECT pg_sleep(9); --`, "{1}'::text[]", `E'\x27'`} {
		q, p := url.QueryEscape(evil), url.PathEscape(evil)
		quoted := `"` + strings.ReplaceAll(evil, `"`, `""`) + `"`
		body := func(format string, args ...any) string {
			for i, a := range args {
				raw, err := json.Marshal(a)
				require.NoError(t, err)
				args[i] = string(raw)
			}
			return fmt.Sprintf(format, args...)
		}
		start := time.Now()
		for _, at := range []string{sites + "queue?table=" + q, sites + "queue?from=" + q, sites + "history?table=public." + url.QueryEscape(quoted), sites + "history?table=public.orders&key=" + q,
			sites + "tables/public.orders/life?key=" + q, sites + "tables/" + url.PathEscape("public."+quoted) + "/cutover?from=school", "/api/v1/sites/" + p, "/api/v1/backfills?site=" + q, "/api/v1/backfills?table=" + q,
			"/api/v1/audit?account=" + q, "/api/v1/audit?action=" + q, "/api/v1/backfills/" + p, path("/backfills/%d/rows?from_key=", id) + q, path("/backfills/%d/rows?key=", id) + q, path("/backfills/%d/rows?effect=", id) + q,
			"/api/v1/reconciliations?site=" + q, "/api/v1/reconciliations?from=" + q} {
			a := w.get(control.Admin, at)
			require.Less(t, a.status, 500, "%s: %s", at, a.raw)
			require.NotContains(t, string(a.raw), "secret-of-the", at)
			if a.status == 200 && !strings.Contains(at, "from_key") {
				require.Empty(t, a.data(), "%s: %s", at, a.raw)
			}
		}
		for _, x := range [][3]string{
			{"POST", "/api/v1/sites", body(`{"name":%s,"sides":["a","b"]}`, evil)},
			{"POST", "/api/v1/sites", body(`{"name":"oak","sides":["a",%s]}`, evil)},
			{"PUT", sites + "gates/" + p, `{"side":"school","kind":"sessions","limit":1}`},
			{"PUT", sites + "gates/load", body(`{"side":%s,"kind":"sessions","limit":1}`, evil)},
			{"PUT", sites + "gates/load", body(`{"side":"school","table":%s,"kind":"sessions","limit":1}`, "public."+quoted)},
			{"PUT", sites + "tables/public.orders", body(`{"captured_from":[%s]}`, evil)},
			{"PUT", sites + "tables/public.orders", body(`{"conflict":%s}`, evil)},
			{"POST", sites + "backfills", body(`{"table":%s,"from":"school"}`, "public."+quoted)},
			{"POST", sites + "backfills", body(`{"table":"public.orders","from":%s}`, evil)},
			{"POST", sites + "backfills", body(`{"table":"public.orders","from":"school","key":[%s]}`, evil)},
			{"POST", sites + "backfills", body(`{"table":"public.orders","from":"school","key":{%s:1}}`, evil)},
			{"POST", sites + "reconciliations", body(`{"table":%s,"from":"school"}`, "public."+quoted)},
			{"POST", "/api/v1/shadow-reads", body(`{"site":"maple","from":"school","reads":[{"table":"public.orders","key":[%s],"row":{%s:"x"}}]}`, evil, evil)},
			{"POST", "/api/v1/users", body(`{"name":%s,"password":"correct horse battery","role":"viewer"}`, evil)},
			{"POST", path("/backfills/%d/pause", id), body(`{"note":%s}`, evil)},
		} {
			a := w.call(control.Admin, x[0], x[1], x[2])
			require.Less(t, a.status, 500, "%v: %s", x, a.raw)
		}
		require.Less(t, time.Since(start), 9*time.Second, "%s slept", evil)
	}
	require.Equal(t, before, w.tables())
	require.Equal(t, 200, w.get(control.Viewer, "/api/v1/sites/maple").status)
}

// tables is how many tables and how many sites and tokens there are.
func (w *world) tables() (n [3]int) {
	conn, err := pgx.Connect(w.Context(), dsnOf(w.database))
	require.NoError(w, err)
	defer conn.Close(w.Context())
	require.NoError(w, conn.QueryRow(w.Context(), `SELECT (SELECT count(*) FROM pg_tables WHERE schemaname = 'backfill_control'),
		(SELECT count(*) FROM backfill_control.site), (SELECT count(*) FROM backfill_control.token)`).Scan(&n[0], &n[1], &n[2]))
	return n
}

// Clients that send byte by byte, or that send no more, lose their connection, and
// hold up nobody meanwhile.
func TestSlowClients(t *testing.T) {
	w := newWorld(t)
	slow := &world{T: t, server: New(Config{Service: w.service, Log: w.service.Log})}
	slow.server.timing.header, slow.server.timing.read = 500*time.Millisecond, time.Second
	slow.serve()
	ended := make(chan string)
	for _, begin := range []string{"", "GET /api/v1/sites HTTP/1.1\r\nHost: x\r\nX-Slow: ", "POST /api/v1/sites HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secret(control.Admin) + "\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"} {
		for range 20 {
			go func() {
				c, err := net.Dial("tcp", strings.TrimPrefix(slow.url, "http://"))
				if err != nil {
					ended <- err.Error()
					return
				}
				defer c.Close()
				c.SetDeadline(time.Now().Add(10 * time.Second))
				io.WriteString(c, begin)
				drip := time.AfterFunc(100*time.Millisecond, func() { io.WriteString(c, "a") })
				defer drip.Stop()
				answer, err := io.ReadAll(bufio.NewReader(c))
				if err != nil {
					ended <- "not ended: " + err.Error()
					return
				}
				ended <- strings.SplitN(string(answer), "\r\n", 2)[0]
			}()
		}
	}
	for range 10 {
		require.Equal(t, 200, slow.get(control.Viewer, "/api/v1/sites").status)
	}
	for range 60 {
		require.Contains(t, []string{"", "HTTP/1.1 400 Bad Request", "HTTP/1.1 408 Request Timeout"}, <-ended)
	}
}

func TestLongHeaders(t *testing.T) {
	w := newWorld(t)
	for _, x := range []struct{ name, value, at string }{{"X-Long", strings.Repeat("x", 40<<10), "/api/v1/sites"}, {"X-Short", "x", "/api/v1/sites?x=" + strings.Repeat("x", 40<<10)}} {
		r, err := http.NewRequestWithContext(t.Context(), "GET", w.url+x.at, nil)
		require.NoError(t, err)
		r.Header.Set(x.name, x.value)
		res, err := http.DefaultClient.Do(r)
		require.NoError(t, err)
		res.Body.Close()
		require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, res.StatusCode)
	}
}

// Whoever reads a list page by page meets everything that was in it at the start, and
// nothing twice, whatever comes in meanwhile.
func TestListsSurviveWhatComesIn(t *testing.T) {
	w := newWorld(t)
	add := func(from, to int) {
		w.exec(`INSERT INTO backfill_control.entry (direction, table_id, layout_id, snap, op, key, row)
			SELECT d.id, t.id, l.id, '1:1:', 'u', ARRAY[n::text], ARRAY[n::text, 'z', NULL]
			  FROM backfill_control.direction d, backfill_control.table_config t, backfill_control.layout l, generate_series($1::int, $2::int) n
			 WHERE d.from_side = 'school' ORDER BY n`, from, to)
		for n := from; n <= to; n++ {
			w.exec(`INSERT INTO backfill_control.audit (account, action, subject) VALUES ('test', 'test.entry', $1)`, fmt.Sprint(n))
		}
		w.exec(`UPDATE backfill_control.request SET state = 'FINISHED', closed_at = now()`)
		w.backfill()
		w.exec(`UPDATE backfill_control.reconciliation SET state = 'FINISHED', verdict = 'EQUAL', closed_at = now()`)
		w.post(control.Requester, "/api/v1/sites/maple/reconciliations", ordersBackfill)
	}
	add(1, 5)
	for range 4 {
		add(0, -1)
	}
	for at, name := range map[string]string{"/api/v1/sites/maple/queue?": "seq", "/api/v1/audit?": "id", "/api/v1/backfills?": "id", "/api/v1/reconciliations?": "id"} {
		whole := w.get(control.Viewer, at+"limit=1000").data()
		seen := map[string]int{}
		next := ""
		for n := 10; ; n++ {
			a := w.get(control.Viewer, at+"limit=2"+next)
			require.Equal(t, 200, a.status, "%s", a.raw)
			for _, x := range a.data() {
				seen[fmt.Sprint(x[name])]++
			}
			c, ok := a.json["next_cursor"].(string)
			if !ok {
				break
			}
			if n < 13 { // a list that grows at its end would have none otherwise
				add(n, n)
			}
			next = "&cursor=" + c
		}
		for _, x := range whole {
			require.Equal(t, 1, seen[fmt.Sprint(x[name])], "%s %v", at, x[name])
		}
		for id, times := range seen {
			require.Equal(t, 1, times, "%s %s", at, id)
		}
	}
}
