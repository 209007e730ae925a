package api

import (
	"testing"

	"github.com/stretchr/testify/require"

	"backfill/internal/control"
)

func TestIdempotencyKey(t *testing.T) {
	w := newWorld(t)
	const at = "/api/v1/sites/maple/backfills"
	key := header{"Idempotency-Key", "first"}
	first := w.post(control.Requester, at, ordersBackfill, key)
	require.Equal(t, 201, first.status, "%s", first.raw)
	again := w.post(control.Requester, at, ordersBackfill, key)
	require.Equal(t, 201, again.status, "%s", again.raw)
	require.Equal(t, first.raw, again.raw)
	require.Equal(t, first.header.Get("Location"), again.header.Get("Location"))
	require.Equal(t, first.header.Get("Content-Type"), again.header.Get("Content-Type"))
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	require.Empty(t, first.header.Get("Idempotency-Replayed"))

	a := w.post(control.Requester, at, `{"table":"public.orders","from":"school","note":"other"}`, key)
	require.Equal(t, 422, a.status, "another body")
	require.Equal(t, []string{"Idempotency-Key"}, a.fields())
	a = w.post(control.Requester, first.header.Get("Location")+"/cancel", ordersBackfill, key)
	require.Equal(t, 422, a.status, "another address")
	require.Equal(t, 409, w.post(control.Admin, at, ordersBackfill, key).status, "another account's key is another key")
	require.Equal(t, 422, w.post(control.Requester, at, ordersBackfill, header{"Idempotency-Key", "né"}).status)

	a = w.post(control.Requester, at, ordersBackfill, header{"Idempotency-Key", "second"})
	require.Equal(t, 409, a.status)
	require.Equal(t, first.header.Get("Location"), a.header.Get("Location"))
	require.Equal(t, 200, w.post(control.Requester, first.header.Get("Location")+"/cancel", "").status)
	a = w.post(control.Requester, at, ordersBackfill, header{"Idempotency-Key", "second"})
	require.Equal(t, 201, a.status, "a call that failed leaves its key free: %s", a.raw)

	w.exec(`UPDATE backfill_control.request SET state = 'FINISHED'`)
	w.exec(`UPDATE backfill_control.idempotency SET created_at = created_at - interval '25 hours'`)
	require.Equal(t, 201, w.post(control.Requester, at, ordersBackfill, key).status)
	require.NotEqual(t, first.header.Get("Location"), w.post(control.Requester, at, ordersBackfill, key).header.Get("Location"), "a key is good for a day")
}

func TestIdempotencyKeyInFlight(t *testing.T) {
	w := newWorld(t)
	const at = "/api/v1/sites/maple/backfills"
	key := header{"Idempotency-Key", "slow"}
	entered, leave := make(chan struct{}), make(chan struct{})
	w.runs.enter = func() { close(entered); <-leave }
	first := make(chan answer)
	go func() { first <- w.post(control.Requester, at, ordersBackfill, key) }()
	<-entered
	a := w.post(control.Requester, at, ordersBackfill, key)
	require.Equal(t, 409, a.status, "%s", a.raw)
	require.Contains(t, a.json["detail"], "under way")
	require.Empty(t, a.header.Get("Location"))
	close(leave)
	made := <-first
	require.Equal(t, 201, made.status)
	require.Equal(t, made.raw, w.post(control.Requester, at, ordersBackfill, key).raw)

	w.exec(`INSERT INTO backfill_control.idempotency (account, key, method, path, body_hash, created_at)
		VALUES ('requester', 'lost', 'POST', $1, '', now() - interval '3 minutes')`, at)
	a = w.post(control.Requester, at, ordersBackfill, header{"Idempotency-Key", "lost"})
	require.Equal(t, made.header.Get("Location"), a.header.Get("Location"), "the key of a call that died is free again")
}
