// Command expand-contract goes through the guide beside it: a table gets a new shape
// while an application writes it and another reads it. It starts a PostgreSQL server
// and Backfill, and says each command before it runs it.
package main

import (
	"bufio"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"backfill/internal/local"
	"backfill/shadow"
)

//go:embed users.sql users-1.yaml users-2.yaml
var files embed.FS

func main() {
	stay := flag.Bool("stay", false, "leave everything running at the end, to be looked at in the pages")
	program := flag.String("backfill", "bin/backfill", "the program")
	listen := flag.String("listen", "127.0.0.1:8080", "where the pages are")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, *program, *listen, *stay); err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "it went wrong:", err)
		os.Exit(1)
	}
}

// example is the two programs of the application, and the database.
type example struct {
	program, dir string
	dsn          string
	db           *pgxpool.Pool
	shape        atomic.Int32 // that the application reads and writes
}

// The shapes: the old one, none while the last changes arrive, and the new one.
const oldShape, noShape, newShape = 0, 1, 2

func run(ctx context.Context, program, listen string, stay bool) (err error) {
	dir, err := os.MkdirTemp("", "backfill-expand-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // the server may run as somebody else
		return err
	}
	say("A PostgreSQL server with the database shop, in which users has 20,000 rows, and users_v2 none")
	server, err := local.StartPostgres(ctx, local.PostgresOptions{Dir: filepath.Join(dir, "postgres")})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	for _, name := range []string{"shop", "control"} {
		if err := server.CreateDatabase(ctx, name); err != nil {
			return err
		}
	}
	e := &example{program: program, dir: dir, dsn: server.DSN("shop")}
	if e.db, err = pgxpool.New(ctx, e.dsn); err != nil {
		return err
	}
	defer e.db.Close()
	for _, name := range []string{"users.sql", "users-1.yaml", "users-2.yaml"} {
		text, err := files.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
		if strings.HasSuffix(name, ".sql") {
			if _, err := e.db.Exec(ctx, string(text), pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
		}
	}
	stop, url, err := e.serve(ctx, server.DSN("control"), listen)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := e.story(ctx, url); err != nil {
		return err
	}
	if stay {
		say("The pages stay at %s until Ctrl-C", url)
		<-ctx.Done()
	}
	return nil
}

// serve starts Backfill with both sides in the database, and returns where it is.
func (e *example) serve(ctx context.Context, control, listen string) (stop func() error, url string, err error) {
	say("Backfill, for a site of which both sides, old and new, are in that database")
	args := []string{"dev", "--state", filepath.Join(e.dir, "state"), "--listen", listen, "--control", control, "--site", "shop", "--one-database",
		"--side", "old=" + e.dsn, "--side", "new=" + e.dsn}
	fmt.Println("$ backfill dev --site shop --one-database --side old=DSN --side new=DSN")
	cmd := exec.CommandContext(ctx, e.program, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	stop = func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		return nil
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		fmt.Println(lines.Text())
		if found, ok := strings.CutPrefix(lines.Text(), "ready: "); ok {
			go func() {
				for lines.Scan() {
				}
			}()
			return stop, found, nil
		}
	}
	return nil, "", errors.Join(errors.New("backfill dev did not start"), stop())
}

func say(format string, args ...any) { fmt.Printf("\n— "+format+"\n", args...) }

// backfill runs a command, shows it and what it prints, and returns that. allowed are
// the exit codes that are no mistake of the example.
func (e *example) backfill(ctx context.Context, allowed []int, args ...string) (string, int, error) {
	shown := make([]string, len(args))
	for i, a := range args {
		shown[i] = a
		if strings.ContainsAny(a, " *") {
			shown[i] = "'" + a + "'"
		}
		shown[i] = strings.ReplaceAll(strings.ReplaceAll(shown[i], e.dir+"/", ""), e.dsn, "DSN")
	}
	fmt.Println("$ backfill " + strings.Join(shown, " "))
	cmd := exec.CommandContext(ctx, e.program, args...)
	cmd.Env = append(os.Environ(), "BACKFILL_STATE="+filepath.Join(e.dir, "state"))
	var text strings.Builder
	cmd.Stdout, cmd.Stderr = io.MultiWriter(os.Stdout, &text), io.MultiWriter(os.Stdout, &text)
	err := cmd.Run()
	code := 0
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		code = failed.ExitCode()
	} else if err != nil {
		return "", 0, err
	}
	for _, c := range append(allowed, 0) {
		if c == code {
			return text.String(), code, nil
		}
	}
	return text.String(), code, fmt.Errorf("backfill %s: exit code %d", args[0], code)
}

func (e *example) story(ctx context.Context, url string) error {
	ok := func(args ...string) error { _, _, err := e.backfill(ctx, nil, args...); return err }
	first, second := filepath.Join(e.dir, "users-1.yaml"), filepath.Join(e.dir, "users-2.yaml")

	say("Expand: what the mapping makes of ten rows, before anything is changed")
	if err := ok("table", "apply", "--try", "-f", first); err != nil {
		return err
	}
	say("It is set, and the triggers are put on users: from now on every change of it is written to users_v2 as well")
	if err := errors.Join(ok("table", "apply", "-f", first), ok("setup", "--site", "shop", "--side", "old", "--database", e.dsn), ok("setup", "--site", "shop", "--side", "new", "--database", e.dsn)); err != nil {
		return err
	}
	token, err := os.ReadFile(filepath.Join(e.dir, "state", "token"))
	if err != nil {
		return err
	}
	say("The application goes on: one program writes users, one reads them, and reports a part of its reads")
	work, stopWork := context.WithCancel(ctx)
	defer stopWork()
	reports := shadow.New(shadow.Config{URL: url, Token: strings.TrimSpace(string(token)), Site: "shop", From: "old", Percent: 50, Rate: 20, Every: time.Second})
	ended := make(chan error, 2)
	go func() { ended <- e.write(work) }()
	go func() { ended <- e.read(work, reports) }()

	if err := e.seen(ctx); err != nil {
		return err
	}
	say("Backfill: the rows that were there before the triggers")
	if err := e.backfilled(ctx, "full"); err != nil {
		return err
	}
	say("Reconcile: both tables have as many rows, and still they differ: the name in the middle is lost")
	if verdict, err := e.reconcile(ctx); err != nil || verdict == "EQUAL" {
		return errors.Join(err, errors.New("the mistake was not found"))
	}
	say("A second version of the mapping; what was proven under the first counts no more")
	if err := ok("table", "apply", "-f", second); err != nil {
		return err
	}
	if verdict, err := e.reconcile(ctx); err != nil || verdict == "EQUAL" {
		return errors.Join(err, errors.New("the rows made by the first version were not found"))
	}
	say("Just the rows that differ are backfilled again")
	if err := e.backfilled(ctx, "differences"); err != nil {
		return err
	}
	say("Reads that were reported meanwhile have found some of these keys too: they are sent again, and then all is compared")
	if _, err := e.repaired(ctx); err != nil {
		return err
	}
	if err := e.equal(ctx); err != nil {
		return err
	}
	say("Shadow reads: the reader's reads are compared with users_v2, for a minute here, for days elsewhere")
	if err := ok("cutover", "set", "--table", "public.users", "--soak", "60s", "--objective", "0.05", "--sample", "600"); err != nil {
		return err
	}
	say("The identity of users_v2 has given no number yet: it is set ahead of all that users may still give")
	fmt.Println("# SELECT setval(pg_get_serial_sequence('users_v2', 'id'), 1000000)")
	if _, err := e.db.Exec(ctx, `SELECT setval(pg_get_serial_sequence('users_v2', 'id'), 1000000)`); err != nil {
		return err
	}
	if err := e.mayRead(ctx); err != nil {
		return err
	}
	say("Cut over: reads and writes move to users_v2. The last changes arrive before users is left alone")
	e.shape.Store(noShape)
	wait(ctx, time.Second) // for a write under way
	if err := e.caughtUp(ctx, 0); err != nil {
		return err
	}
	e.shape.Store(newShape)
	say("Contract: the table is taken out of the site, its triggers go, and users with them")
	if err := errors.Join(ok("table", "remove", "public.users"), ok("setup", "--site", "shop", "--side", "old", "--database", e.dsn)); err != nil {
		return err
	}
	if _, err := e.db.Exec(ctx, `DROP TABLE users`); err != nil {
		return err
	}
	stopWork()
	if err := errors.Join(<-ended, <-ended, reports.Close(ctx)); err != nil {
		return err
	}
	n := reports.Counts()
	say("Done. %d reads were reported, %d dropped", n.Sent, n.Dropped)
	return nil
}

// seen waits until the agent has counted the table and seen its triggers.
func (e *example) seen(ctx context.Context) error {
	for end := time.Now().Add(patience); ctx.Err() == nil && time.Now().Before(end); wait(ctx, time.Second) {
		cmd := exec.CommandContext(ctx, e.program, "table", "list", "--json")
		cmd.Env = append(os.Environ(), "BACKFILL_STATE="+filepath.Join(e.dir, "state"))
		out, err := cmd.Output()
		if err != nil {
			return err
		}
		if strings.Contains(string(out), `"can_request":true`) {
			return nil
		}
	}
	return errors.Join(ctx.Err(), errors.New("the agent does not see the triggers"))
}

var requested = regexp.MustCompile(`request (\d+):`)

// backfilled requests a backfill, shows some of what it would write, approves, and waits.
func (e *example) backfilled(ctx context.Context, mode string) error {
	text, _, err := e.backfill(ctx, nil, "request", "--table", "public.users", "--mode", mode, "--watch")
	if err != nil {
		return err
	}
	found := requested.FindStringSubmatch(text)
	if found == nil {
		return errors.New("no request was made")
	}
	for _, args := range [][]string{{"rows", found[1], "--limit", "3"}, {"approve", found[1], "--note", "read"}, {"watch", found[1], "--until", "closed"}} {
		if _, _, err := e.backfill(ctx, nil, args...); err != nil {
			return err
		}
	}
	return e.caughtUp(ctx, 50)
}

// caughtUp waits until no more than a few changes are on their way.
func (e *example) caughtUp(ctx context.Context, few int) error {
	for ctx.Err() == nil {
		var left int
		if err := e.db.QueryRow(ctx, `
			SELECT (SELECT count(*) FROM users u FULL JOIN users_v2 v USING (id) WHERE u.email::citext IS DISTINCT FROM v.email) + (SELECT count(*) FROM backfill_shop_old.outbox)`).Scan(&left); err != nil || left <= few {
			return err
		}
		wait(ctx, 200*time.Millisecond)
	}
	return ctx.Err()
}

var judged = regexp.MustCompile(`FINISHED  (\w+)`)

// reconcile compares both tables and returns the verdict, "" when another run is open.
func (e *example) reconcile(ctx context.Context) (verdict string, err error) {
	text, _, err := e.backfill(ctx, []int{1, 3}, "reconcile", "--table", "public.users", "--watch")
	if found := judged.FindStringSubmatch(text); found != nil {
		verdict = found[1]
	}
	return verdict, err
}

// equal reconciles until the verdict is EQUAL. It is UNKNOWN where keys were written all
// the while, or an agent was behind: then it is asked again.
func (e *example) equal(ctx context.Context) error {
	for end := time.Now().Add(patience); time.Now().Before(end); wait(ctx, 5*time.Second) {
		switch verdict, err := e.reconcile(ctx); {
		case err != nil || verdict == "EQUAL":
			return err
		case verdict == "DIFFERENT":
			return errors.New("the tables still differ")
		}
	}
	return errors.New("it does not come to be known whether the tables are equal")
}

// repaired repairs what reported reads have set aside, and tells whether there was any.
func (e *example) repaired(ctx context.Context) (found bool, err error) {
	cmd := exec.CommandContext(ctx, e.program, "reconcile", "list", "--json")
	cmd.Env = append(os.Environ(), "BACKFILL_STATE="+filepath.Join(e.dir, "state"))
	out, err := cmd.Output()
	if err != nil {
		return false, err
	}
	var list struct {
		Data []struct {
			ID    int64
			Mode  string
			State string
			Keys  struct{ Open int64 }
		}
	}
	if err := json.Unmarshal(out, &list); err != nil {
		return false, err
	}
	for _, r := range list.Data {
		if r.Mode == "shadow" && r.State == "FINISHED" && r.Keys.Open > 0 {
			if _, _, err := e.backfill(ctx, nil, "reconcile", "repair", fmt.Sprint(r.ID), "--note", "sent again already", "--watch"); err != nil {
				return false, err
			}
			found = true
		}
	}
	return found, nil
}

// patience is how long any step may take on a busy machine.
const patience = 8 * time.Minute

// mayRead asks the cutover gate until it says yes. A read that was judged just before
// its row was sent again may set the key aside late: it is repaired like those before.
func (e *example) mayRead(ctx context.Context) error {
	for end := time.Now().Add(patience); ; {
		_, code, err := e.backfill(ctx, []int{3}, "cutover", "--table", "public.users")
		if err != nil || code == 0 {
			return err
		}
		if time.Now().After(end) {
			_, _, err := e.backfill(ctx, nil, "reconcile", "list")
			return errors.Join(err, errors.New("the gate still says no"))
		}
		late, err := e.repaired(ctx)
		if err != nil {
			return err
		}
		if late { // the soak begins again
			if err := e.equal(ctx); err != nil {
				return err
			}
			end = time.Now().Add(patience)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Second):
		}
	}
}

// write is the program that writes users: fifty changes a second. After the cutover it
// writes the new shape.
func (e *example) write(ctx context.Context) error {
	for n := 20_001; ctx.Err() == nil; n++ {
		wait(ctx, 20*time.Millisecond)
		shape := e.shape.Load()
		id := 1 + rand.IntN(20_000)
		sql, args := `UPDATE users SET email = 'new' || $1::int || '@example.org' WHERE id = $1`, []any{id}
		switch {
		case shape == noShape:
			continue
		case shape == newShape:
			sql = `UPDATE users_v2 SET email = 'new' || $1::int || '@example.org' WHERE id = $1`
		case n%5 == 0:
			sql, args = `INSERT INTO users (name, email, created) VALUES ('Ed Ty Nr' || $1::int, 'ed@example.org', current_date)`, []any{n}
		case n%5 == 1:
			sql, args = `DELETE FROM users WHERE id = $1 AND id > 100`, []any{id}
		}
		if _, err := e.db.Exec(ctx, sql, args...); err != nil && ctx.Err() == nil {
			return fmt.Errorf("the writer: %w", err)
		}
	}
	return nil
}

// user is what the application reads.
type user struct {
	Name, Email, Created *string
}

// read is the program that reads users. It serves what users has, and reports half of it;
// after the cutover it reads users_v2.
func (e *example) read(ctx context.Context, reports *shadow.Reporter) error {
	old := func(ctx context.Context, id int64) (u user, err error) {
		err = e.db.QueryRow(ctx, `SELECT name, email, created::text FROM users WHERE id = $1`, id).Scan(&u.Name, &u.Email, &u.Created)
		if errors.Is(err, pgx.ErrNoRows) {
			err = nil
		}
		return u, err
	}
	get := shadow.Wrap(reports, "public.users", old, func(id int64, u user) shadow.Read {
		if u.Name == nil {
			return shadow.Read{Key: []any{id}}
		}
		return shadow.Read{Key: []any{id}, Row: map[string]any{"name": *u.Name, "email": u.Email, "created": *u.Created}}
	})
	for ctx.Err() == nil {
		id := 1 + rand.Int64N(20_000)
		var err error
		if e.shape.Load() != newShape {
			_, err = get(ctx, id)
		} else {
			_, err = e.db.Exec(ctx, `SELECT first_name, last_name, email, created_at FROM users_v2 WHERE id = $1`, id)
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("the reader: %w", err)
		}
		wait(ctx, 20*time.Millisecond)
	}
	return nil
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
