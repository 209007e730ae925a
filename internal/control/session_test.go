package control_test

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/testkit"
)

const password = "correct horse battery"

// signInWorld is a control database with two processes' stores, and a session beside them.
func signInWorld(t *testing.T) (s, other *control.Store, conn *pgx.Conn) {
	t.Helper()
	dsn := testkit.ControlDSN(t)
	_, err := control.Migrate(t.Context(), dsn)
	require.NoError(t, err)
	for _, to := range []**control.Store{&s, &other} {
		*to, err = control.Open(t.Context(), dsn)
		require.NoError(t, err)
		t.Cleanup((*to).Disconnect)
	}
	return s, other, testkit.Session(t, dsn)
}

func TestTriesToSignInAreCountedForAllProcesses(t *testing.T) {
	s, other, conn := signInWorld(t)
	ctx := t.Context()
	require.NoError(t, s.CreateUser(ctx, "test", "ruth", control.Rights{Role: control.Viewer}, password))
	var mu sync.Mutex
	codes := map[backfill.Code]int{}
	var wg sync.WaitGroup
	for n := range 40 { // at once, in two processes, from many addresses
		wg.Go(func() {
			store := []*control.Store{s, other}[n%2]
			_, err := store.SignIn(ctx, "Ruth", "wrong horse battery", "10.0.0."+strconv.Itoa(n), time.Hour)
			mu.Lock()
			defer mu.Unlock()
			codes[backfill.CodeOf(err)]++
		})
	}
	wg.Wait()
	require.Equal(t, map[backfill.Code]int{backfill.Unauthorized: 10, backfill.TooMany: 30}, codes)
	_, err := s.SignIn(ctx, "ruth", password, "10.1.1.1", time.Hour)
	require.Equal(t, backfill.TooMany, backfill.CodeOf(err))
	_, err = conn.Exec(ctx, `UPDATE backfill_control.sign_in SET since = since - interval '16 min'`)
	require.NoError(t, err)
	_, err = s.SignIn(ctx, "ruth", password, "10.1.1.1", time.Hour)
	require.NoError(t, err, "after a while")

	clear(codes)
	for n := range 120 { // of many names from the addresses of one network
		_, err := s.SignIn(ctx, "name-"+strconv.Itoa(n), "wrong horse battery", "2001:db8::"+strconv.Itoa(n), time.Hour)
		codes[backfill.CodeOf(err)]++
	}
	require.Equal(t, map[backfill.Code]int{backfill.Unauthorized: 50, backfill.TooMany: 120 - 50}, codes)
}

// Ten thousand guesses cost ten hashes, and do not keep others out.
func TestTenThousandWrongPasswords(t *testing.T) {
	s, other, _ := signInWorld(t)
	ctx := t.Context()
	for _, name := range []string{"ruth", "ann"} {
		require.NoError(t, s.CreateUser(ctx, "test", name, control.Rights{Role: control.Viewer}, password))
	}
	var looked, refused atomic.Int64
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			for i := range 1250 {
				_, err := []*control.Store{s, other}[n%2].SignIn(ctx, "ruth", "guess number "+strconv.Itoa(n*1250+i), fmt.Sprintf("10.%d.%d.%d", n, i/250, i%250), time.Hour)
				if backfill.CodeOf(err) == backfill.TooMany {
					refused.Add(1)
				} else if backfill.CodeOf(err) == backfill.Unauthorized {
					looked.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.Equal(t, []int64{10, 9990}, []int64{looked.Load(), refused.Load()})
	_, err := s.SignIn(ctx, "ann", password, "10.9.9.9", time.Hour)
	require.NoError(t, err)
}

func TestSessionsEnd(t *testing.T) {
	s, other, conn := signInWorld(t)
	ctx := t.Context()
	rights := control.Rights{Role: control.Reviewer}
	begin := func() string {
		require.NoError(t, s.CreateUser(ctx, "test", "ruth", rights, password))
		id, err := s.SignIn(ctx, "ruth", password, "10.0.0.1", time.Hour)
		require.NoError(t, err)
		i, err := other.Session(ctx, id)
		require.NoError(t, err)
		require.Equal(t, control.Identity{Name: "ruth", Rights: rights, Via: control.ViaSession}, i)
		return id
	}
	exec := func(sql string) func() error {
		return func() error { _, err := conn.Exec(ctx, sql); return err }
	}
	id := ""
	for name, end := range map[string]func() error{
		"signed out":       func() error { return s.EndSession(ctx, id) },
		"nothing asked":    exec(`UPDATE backfill_control.session SET seen_at = seen_at - interval '25 h'`),
		"its time is over": exec(`UPDATE backfill_control.session SET expires_at = clock_timestamp()`),
		"another password": func() error { return s.SetUser(ctx, "test", "ruth", nil, new(password+"!")) },
		"removed":          func() error { return s.RemoveUser(ctx, "test", "ruth") },
	} {
		id = begin()
		require.NoError(t, end(), name)
		_, err := other.Session(ctx, id)
		require.Equal(t, backfill.Unauthorized, backfill.CodeOf(err), name)
		_ = s.RemoveUser(ctx, "test", "ruth")
	}
	secret := control.NewSecret()
	for name, end := range map[string]func() error{
		"revoked":        func() error { return s.RevokeToken(ctx, "test", "tom") },
		"another secret": func() error { return s.PutToken(ctx, "test", "tom", control.Admin, control.NewSecret()) },
		"expired":        exec(`UPDATE backfill_control.token SET expires_at = clock_timestamp() WHERE name = 'tom'`),
	} {
		require.NoError(t, s.PutToken(ctx, "test", "tom", control.Admin, secret))
		id, err := s.SignInByToken(ctx, secret, "10.0.0.1", time.Hour)
		require.NoError(t, err)
		require.NoError(t, s.PutToken(ctx, "test", "tom", control.Viewer, secret))
		i, err := s.Session(ctx, id)
		require.NoError(t, err, "the same secret with another role goes on")
		require.Equal(t, control.Viewer, i.Role)
		require.NoError(t, end(), name)
		_, err = other.Session(ctx, id)
		require.Equal(t, backfill.Unauthorized, backfill.CodeOf(err), name)
	}
}

// Names in records mean one person or token.
func TestAUserAndATokenOfOneName(t *testing.T) {
	s, _, conn := signInWorld(t)
	ctx := t.Context()
	require.NoError(t, s.CreateUser(ctx, "test", "Ruth", control.Rights{Role: control.Viewer}, password))
	require.Equal(t, backfill.Conflict, backfill.CodeOf(s.PutToken(ctx, "test", "ruth", control.Admin, control.NewSecret())))
	require.Equal(t, backfill.Conflict, backfill.CodeOf(s.CreateUser(ctx, "test", "RUTH", control.Rights{Role: control.Viewer}, password)))
	require.NoError(t, s.PutToken(ctx, "test", "tom", control.Admin, control.NewSecret()))
	require.Equal(t, backfill.Conflict, backfill.CodeOf(s.CreateUser(ctx, "test", "Tom", control.Rights{Role: control.Viewer}, password)))
	for name, bad := range map[string]string{"short": "short", "its own name": "ruth-ruth-ruth"} {
		require.Equal(t, backfill.Invalid, backfill.CodeOf(s.SetUser(ctx, "test", "Ruth", nil, &bad)), name)
	}
	var stored string
	require.NoError(t, conn.QueryRow(ctx, `SELECT password FROM backfill_control.account`).Scan(&stored))
	require.Regexp(t, `^\$argon2id\$v=19\$m=19456,t=2,p=1\$[^$]{22}\$[^$]{43}$`, stored)
}

func TestTheFirstAccountIsMadeByALinkOnce(t *testing.T) {
	s, other, conn := signInWorld(t)
	ctx := t.Context()
	late, err := s.FirstLink(ctx)
	require.NoError(t, err)
	_, err = conn.Exec(ctx, `UPDATE backfill_control.sign_in_link SET expires_at = clock_timestamp()`)
	require.NoError(t, err)
	first, err := s.FirstLink(ctx)
	require.NoError(t, err)
	second, err := other.FirstLink(ctx)
	require.NoError(t, err)
	for _, bad := range []string{late, "", control.NewSecret()} {
		require.Equal(t, backfill.Unauthorized, backfill.CodeOf(s.FirstUser(ctx, bad, "ruth", password)))
	}
	require.Equal(t, backfill.Invalid, backfill.CodeOf(s.FirstUser(ctx, first, "ruth", "short")), "which does not use it up")
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for n := range errs {
		wg.Go(func() {
			errs[n] = []*control.Store{s, other}[n%2].FirstUser(ctx, []string{first, second}[n%2], "ruth-"+strconv.Itoa(n), password)
		})
	}
	wg.Wait()
	users, err := s.Users(ctx)
	require.NoError(t, err)
	require.Len(t, users, 1, "%v", errs)
	require.Equal(t, control.Rights{Role: control.Admin}, users[0].Rights)
	require.NoError(t, s.RemoveUser(ctx, "test", users[0].Name))
	require.Equal(t, backfill.Unauthorized, backfill.CodeOf(s.FirstUser(ctx, first, "eve", password)), "used is used")
	require.NoError(t, s.PutToken(ctx, "test", "tom", control.Viewer, control.NewSecret()))
	none, err := s.FirstLink(ctx)
	require.NoError(t, err)
	require.Empty(t, none)
}
