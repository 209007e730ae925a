package api

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/cli"
	"backfill/internal/control"
)

// commands are those of the command line that talk to the API, as main.go has them.
type commands struct {
	Site    cli.Site    `cmd:""`
	Table   cli.Table   `cmd:""`
	Request cli.Request `cmd:""`
	List    cli.List    `cmd:""`
	Show    cli.Show    `cmd:""`
	Watch   cli.Watch   `cmd:""`
	Rows    cli.Rows    `cmd:""`
	Approve cli.Approve `cmd:""`
	Reject  cli.Reject  `cmd:""`
	Pause   cli.Pause   `cmd:""`
	Resume  cli.Resume  `cmd:""`
	Cancel  cli.Cancel  `cmd:""`
	Queue   cli.Queue   `cmd:""`
	History cli.History `cmd:""`
	Audit   cli.Audit   `cmd:""`
}

// command runs a command line against the API with a token.
func (w *world) command(t *testing.T, token string, args ...string) (status int, out, errs string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	at := slices.Index(args, "--")
	if at < 0 {
		at = len(args)
	}
	status = cli.Run(ctx, slices.Insert(args, at, "--api", w.url, "--token", token), &stdout, &stderr, &commands{})
	return status, stdout.String(), stderr.String()
}

// Whatever makes no sense, is not allowed, or is not possible now, is answered the
// same by the API and on the command line: what happened, to what, and what to do.
func TestBadInput(t *testing.T) {
	w := newWorld(t)
	w.table("public.items", []string{"order_id", "line"}, []string{"bigint", "smallint"})
	w.table("public.idle", []string{"id"}, []string{"bigint"})
	w.exec(`UPDATE backfill_control.table_config SET active = false, op_update = false WHERE name = 'public.idle'`)
	w.exec(`UPDATE backfill_control.table_side SET row_count = 1234567, capture_ok = false WHERE table_id = (SELECT id FROM backfill_control.table_config WHERE name = 'public.idle')`)
	w.table("public.paused", []string{"id"}, []string{"bigint"})
	review := w.staged(3)
	a := w.post(control.Requester, "/api/v1/sites/maple/backfills", `{"table":"public.paused","from":"school"}`)
	require.Equal(t, 201, a.status)
	running := a.json["id"]
	w.exec(`INSERT INTO backfill_control.entry (direction, table_id, snap, op, key) SELECT d.id, t.id, '1:1:', 'u', '{1}' FROM backfill_control.direction d, backfill_control.table_config t
		WHERE d.from_side = 'school' AND t.name = 'public.orders'`)
	require.NoError(t, w.store.PutToken(t.Context(), "test", "gone", control.Admin, "secret-that-was-revoked"))
	require.NoError(t, w.store.RevokeToken(t.Context(), "test", "gone"))

	items := func(key string) string {
		return `{"table":"public.items","from":"school","key":` + key + `}`
	}
	const backfills = "/api/v1/sites/maple/backfills"
	const request = "request --site maple --from school --table "
	for _, c := range []struct {
		name                 string
		token                string // default: an admin's
		method, target, body string // of the API; "" when only the command line can be given it
		status               int
		says                 string // by both
		command              string // split at spaces; · stands for a space
		exit                 int
	}{
		{name: "unknown site", target: "/api/v1/sites/oak/tables", status: 404, says: `no site "oak"`, command: "table list --site oak", exit: 1},
		{name: "unknown table", method: "POST", target: backfills, body: `{"table":"public.nowhere","from":"school"}`, status: 404, says: `no table public.nowhere of a site "maple"`, command: request + "public.nowhere", exit: 1},
		{name: "unknown side", method: "POST", target: backfills, body: `{"table":"public.orders","from":"moon"}`, status: 404, says: `no side "moon" of a site "maple"`,
			command: "request --site maple --from moon --table public.orders", exit: 1},
		{name: "unknown request", target: "/api/v1/backfills/999", status: 404, says: "no request 999", command: "show 999", exit: 1},
		{name: "rows of an unknown request", target: "/api/v1/backfills/999/rows", status: 404, says: "no request 999", command: "rows 999", exit: 1},
		{name: "decision about an unknown request", method: "POST", target: "/api/v1/backfills/999/approve", body: `{"revision":1}`, status: 404, says: "no request 999", command: "approve 999 --revision 1", exit: 1},
		{name: "watching an unknown request", target: "/api/v1/backfills/999/events", status: 404, says: "no request 999", command: "watch 999", exit: 1},
		{name: "unknown change", method: "POST", target: "/api/v1/sites/maple/queue/999/skip", status: 404, says: "no change 999", command: "queue skip 999 --site maple", exit: 1},
		{name: "change that is not set aside", method: "POST", target: "/api/v1/sites/maple/queue/1/retry", status: 409, says: "is not held or quarantined", command: "queue retry 1 --site maple", exit: 3},

		{name: "no table name", method: "POST", target: backfills, body: `{"table":"orders","from":"school"}`, status: 422, says: "write schema.table", command: request + "orders", exit: 2},
		{name: "key of the wrong arity", method: "POST", target: backfills, body: items(`[1,2,3]`), status: 422, says: "the key of public.items is (order_id, line), 2 values: got 3",
			command: request + "public.items --key 1 --key 2 --key 3", exit: 2},
		{name: "key column of the wrong type", method: "POST", target: backfills, body: items(`[1,"x"]`), status: 422, says: `key.line is "x", which is no smallint`, command: request + "public.items --key 1 --key x", exit: 2},
		{name: "key column beyond its type", method: "POST", target: backfills, body: items(`{"order_id":1,"line":32768}`), status: 422, says: `key.line is "32768", which is no smallint`,
			command: request + `public.items --key {"order_id":1,"line":32768}`, exit: 2},
		{name: "key column missing", method: "POST", target: backfills, body: items(`{"order_id":1}`), status: 422, says: `key.line is missing`, command: request + `public.items --key {"order_id":1}`, exit: 2},
		{name: "key column unknown", method: "POST", target: backfills, body: items(`{"order_id":1,"line":1,"more":1}`), status: 422, says: `key.more is not a key column`,
			command: request + `public.items --key {"order_id":1,"line":1,"more":1}`, exit: 2},
		{name: "key of a list that does not fit", target: "/api/v1/sites/maple/history?table=public.items&key=1", status: 422, says: "(order_id, line), 2 values: got 1",
			command: "history --site maple --table public.items --key 1", exit: 2},
		{name: "key that is no JSON", says: "is not JSON", command: request + "public.items --key [1", exit: 2},

		{name: "second request", method: "POST", target: backfills, body: ordersBackfill, status: 409, says: fmt.Sprintf("request %d is open", review), command: request + "public.orders", exit: 3},
		{name: "conditions", method: "POST", target: backfills, body: `{"table":"public.idle","from":"school"}`, status: 422, says: "the table is not active", command: request + "public.idle", exit: 3},
		{name: "decision for another revision", method: "POST", target: path("/backfills/%d/approve", review), body: `{"revision":6}`, status: 409, says: "stands at revision 7, the decision is for revision 6",
			command: fmt.Sprintf("approve %d --revision 6", review), exit: 3},
		{name: "decision in the wrong state", method: "POST", target: path("/backfills/%s/approve", fmt.Sprint(running)), body: `{"revision":0}`, status: 409, says: "is PENDING: only a request that is AWAITING_REVIEW can be decided",
			command: fmt.Sprintf("approve %s", running), exit: 3},
		{name: "rejection without a note", method: "POST", target: path("/backfills/%d/reject", review), body: `{"revision":7,"note":"·"}`, status: 422, says: "note", command: fmt.Sprintf("reject %d", review), exit: 2},
		{name: "pause of what waits", method: "POST", target: path("/backfills/%d/pause", review), status: 409, says: "only a walk or a release can be paused", command: fmt.Sprintf("pause %d", review), exit: 3},
		{name: "resume of what waits", method: "POST", target: path("/backfills/%d/resume", review), status: 409, says: "only a paused walk or release can be resumed", command: fmt.Sprintf("resume %d", review), exit: 3},
		{name: "resume of what is not paused", method: "POST", target: path("/backfills/%s/resume", fmt.Sprint(running)), status: 409, says: "is not paused: there is nothing to resume", command: fmt.Sprintf("resume %s", running), exit: 3},

		{name: "wrong token", token: "wrong", target: "/api/v1/sites", status: 401, says: "token", command: "site list", exit: 1},
		{name: "revoked token", token: "secret-that-was-revoked", target: "/api/v1/sites", status: 401, says: "token", command: "site list", exit: 1},
		{name: "viewer requests", token: secret(control.Viewer), method: "POST", target: backfills, body: ordersBackfill, status: 403, says: "needs role requester", command: request + "public.orders", exit: 3},
		{name: "requester approves", token: secret(control.Requester), method: "POST", target: path("/backfills/%d/approve", review), body: `{"revision":7}`, status: 403, says: "needs role reviewer",
			command: fmt.Sprintf("approve %d", review), exit: 3},
		{name: "reviewer configures", token: secret(control.Reviewer), method: "PUT", target: "/api/v1/sites/maple/tables/public.x", body: `{"captured_from":["school"]}`, status: 403, says: "needs role admin",
			command: "table set public.x --site maple --from school", exit: 3},
		{name: "reviewer opens an epoch", token: secret(control.Reviewer), method: "POST", target: "/api/v1/sites/maple/epoch", body: `{"note":"x"}`, status: 403, says: "needs role admin", command: "site new-epoch maple --note x", exit: 3},

		{name: "limit of none", target: "/api/v1/backfills?limit=0", status: 422, says: "limit", command: "list --limit 0", exit: 2},
		{name: "limit below none", target: "/api/v1/backfills?limit=-1", status: 422, says: "limit", command: "list --limit=-1", exit: 2},
		{name: "limit beyond all", target: "/api/v1/backfills?limit=1000000000", status: 422, says: "limit"},
		{name: "limit beyond numbers", target: "/api/v1/backfills?limit=99999999999999999999", status: 422, says: "limit", command: "list --limit 99999999999999999999", exit: 2},
		{name: "cursor of nowhere", target: "/api/v1/backfills?cursor=AAAAAAAAAAE", status: 422, says: "cursor"},
		{name: "id below all", target: "/api/v1/backfills/-1", status: 404, says: "no ", command: "show -- -1", exit: 1},
		{name: "id beyond numbers", target: "/api/v1/backfills/9223372036854775808", status: 404, says: "no id"},
		{name: "id beyond numbers as an argument", says: "9223372036854775808", command: "show 9223372036854775808", exit: 2},
		{name: "unknown state", target: "/api/v1/backfills?state=OPEN", status: 422, says: "state", command: "list --state open", exit: 2},
		{name: "unknown effect", target: path("/backfills/%d/rows?effect=none", review), status: 422, says: "effect", command: fmt.Sprintf("rows %d --effect none", review), exit: 2},
		{name: "long note", method: "POST", target: path("/backfills/%d/cancel", review), body: `{"note":"` + strings.Repeat("x", 4001) + `"}`, status: 422, says: "note",
			command: fmt.Sprintf("cancel %d --note %s", review, strings.Repeat("x", 4001)), exit: 2},
		{name: "note with NUL", method: "POST", target: path("/backfills/%d/cancel", review), body: `{"note":"\u0000"}`, status: 422, says: "note"},
		{name: "note that is not UTF-8", method: "POST", target: path("/backfills/%d/cancel", review), body: "{\"note\":\"\xff\"}", status: 400, says: "not UTF-8", command: fmt.Sprintf("cancel %d --note \xff", review), exit: 2},
		{name: "broken JSON", method: "POST", target: backfills, body: `{"table":`, status: 400, says: "JSON"},
		{name: "unknown field", method: "POST", target: backfills, body: `{"table":"public.orders","from":"school","who":"me"}`, status: 422, says: "who"},
		{name: "bad name of a site", method: "POST", target: "/api/v1/sites", body: `{"name":"Ma ple","sides":["a","b"]}`, status: 422, says: "name", command: "site add Ma·ple --side a --side b", exit: 2},
		{name: "site that exists", method: "POST", target: "/api/v1/sites", body: `{"name":"maple","sides":["a","b"]}`, status: 409, says: "exists already", command: "site add maple --side a --side b", exit: 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.token == "" {
				c.token = secret(control.Admin)
			}
			if c.target != "" {
				if c.method == "" {
					c.method = "GET"
				}
				here := &world{T: t, url: w.url, server: w.server}
				a := here.call("", c.method, c.target, strings.ReplaceAll(c.body, "·", " "), header{"Authorization", "Bearer " + c.token})
				require.Equal(t, c.status, a.status, "%s", a.raw)
				require.Contains(t, fmt.Sprint(a.json["detail"], a.json["errors"]), c.says)
				if c.status == http.StatusConflict && c.name == "second request" {
					require.Equal(t, path("/backfills/%d", review), a.header.Get("Location"))
				}
			}
			if c.command == "" {
				return
			}
			args := strings.Fields(c.command)
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "·", " ")
			}
			status, out, errs := w.command(t, c.token, args...)
			require.Equal(t, c.exit, status, "%s%s", out, errs)
			require.Contains(t, errs, c.says)
			require.Contains(t, errs, "backfill: ")
			if c.name == "conditions" {
				require.Equal(t, 1, strings.Count(errs, "the table is not active"), "each condition once: %s", errs)
				require.Contains(t, errs, "create and update must both be enabled")
				require.Contains(t, errs, "it has 1,234,567, central has 1,234,567")
			}
		})
	}
	require.Equal(t, backfill.AwaitingReview, w.state(review), "nothing of this changes anything")

	status, out, errs := w.command(t, secret(control.Viewer), "watch", fmt.Sprint(review))
	require.Equal(t, cli.OK, status, "what awaits review is not waited for: %s", errs)
	require.Contains(t, out, "AWAITING_REVIEW")
	status, out, errs = w.command(t, secret(control.Viewer), "rows", fmt.Sprint(review), "--effect", "insert")
	require.Equal(t, cli.OK, status, errs)
	require.Empty(t, out)
	require.Contains(t, errs, "3 rows not judged yet")
	status, out, errs = w.command(t, secret(control.Admin), "approve", fmt.Sprint(review), "--skip-identical")
	require.Equal(t, cli.OK, status, errs)
	require.Contains(t, out, "3 rows not judged yet cannot be left out")
}

// What is away is said on the command line too.
func TestAwayOnTheCommandLine(t *testing.T) {
	w := newWorld(t)
	id := w.staged(1)
	w.runs.fail(&backfill.Error{Code: backfill.Unavailable, Message: "Temporal is away: nothing was decided, try again"})
	status, _, errs := w.command(t, secret(control.Admin), "approve", fmt.Sprint(id))
	require.Equal(t, cli.Failed, status, errs)
	require.Contains(t, errs, "Temporal is away: nothing was decided, try again")
	require.NoError(t, execute(t.Context(), dsnOf("postgres"), `DROP DATABASE `+w.database+` WITH (FORCE)`))
	status, _, errs = w.command(t, secret(control.Admin), "show", fmt.Sprint(id))
	require.Equal(t, cli.Failed, status, errs)
	require.Contains(t, errs, "the control database is away")
}
