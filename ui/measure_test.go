//go:build linux

package ui_test

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

var (
	measure     = flag.Bool("measure", false, "measure the pages over many staged rows, and many open pages")
	measureRows = flag.Int64("measure-rows", 1_000_000, "how many rows are staged")
)

// server is `backfill api` as a process of its own, so that what it costs can be
// told from what its clients cost.
type server struct {
	*world
	pid int
}

func (w *world) apart() *server {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(w.t, err)
	address := l.Addr().String()
	require.NoError(w.t, l.Close())
	p := start(w.t, "api", "--control", w.db.Config().ConnString(), "--temporal", "127.0.0.1:1", "--listen", address)
	s := &server{&world{t: w.t, url: "http://" + address, db: w.db, store: w.store}, p.pid}
	require.Eventually(w.t, func() bool {
		res, err := http.Get(s.url + "/healthz")
		if err == nil {
			res.Body.Close()
		}
		return err == nil
	}, time.Minute, 50*time.Millisecond)
	return s
}

// cpu is the processor time the server has used.
func (s *server) cpu() time.Duration {
	s.t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.pid))
	require.NoError(s.t, err)
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	var ticks int64
	for _, f := range fields[11:13] { // user and system time, in hundredths of a second
		n, err := strconv.ParseInt(f, 10, 64)
		require.NoError(s.t, err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// stageMany makes the students' request one of that many judged rows.
func (w *world) stageMany(rows int64) int64 {
	w.t.Helper()
	id := w.request("public.students", backfill.AwaitingReview)
	for _, sql := range []string{`
		INSERT INTO backfill_control.staged (request_id, n, snap, key, row)
		SELECT request_id, g, snap, ARRAY[(g + 64230)::text], (g + 64230)::text || row[2:]
		  FROM generate_series(100001, $2::bigint) g JOIN backfill_control.staged ON request_id = $1 AND n = 1 + g % 100000`, `
		INSERT INTO backfill_control.effect (request_id, n, effect, receiver)
		SELECT request_id, g, effect, receiver FROM generate_series(100001, $2::bigint) g JOIN backfill_control.effect ON request_id = $1 AND n = 1 + g % 100000`, `
		DELETE FROM backfill_control.judged WHERE request_id = $1 AND upto <= $2::bigint`, `
		INSERT INTO backfill_control.judged (request_id, upto, n_insert, n_overwrite, n_identical)
		SELECT $1, max(n), count(*) FILTER (WHERE effect = 'i'), count(*) FILTER (WHERE effect = 'o'), count(*) FILTER (WHERE effect = '=')
		  FROM backfill_control.effect WHERE request_id = $1 AND n <= $2::bigint GROUP BY (n - 1) / 10000`, `
		UPDATE backfill_control.request SET staged = $2::bigint, expected = $2::bigint, classified = $2::bigint, resume_key = ARRAY[($2::bigint + 64230)::text], upper_key = ARRAY[($2::bigint + 64230)::text],
		       n_insert = c.i, n_overwrite = c.o, n_identical = c.s
		  FROM (SELECT count(*) FILTER (WHERE effect = 'i') AS i, count(*) FILTER (WHERE effect = 'o') AS o, count(*) FILTER (WHERE effect = '=') AS s
		          FROM backfill_control.effect WHERE request_id = $1) c WHERE id = $1`,
	} {
		_, err := w.db.Exec(w.t.Context(), sql, id, rows)
		require.NoError(w.t, err)
	}
	_, err := w.db.Exec(w.t.Context(), `VACUUM ANALYZE backfill_control.staged, backfill_control.effect, backfill_control.judged`)
	require.NoError(w.t, err)
	return id
}

// took is the median and the longest of the times that answers took, from asking
// to the last byte.
func (s *server) took(path string) (median, longest time.Duration) {
	s.t.Helper()
	var all []time.Duration
	for range 21 {
		begin := time.Now()
		res, body := s.get(path, adminToken)
		all = append(all, time.Since(begin))
		require.Equal(s.t, http.StatusOK, res.StatusCode, body)
	}
	slices.Sort(all)
	return all[len(all)/2], all[len(all)-1]
}

// TestMeasureReview says how long pages of a review take.
//
//	make measure
func TestMeasureReview(t *testing.T) {
	if !*measure {
		t.Skip("no -measure")
	}
	w := newWorld(t)
	n := *measureRows
	id := w.stageMany(n)
	s := w.apart()
	base := fmt.Sprintf("/api/v1/backfills/%d/rows?limit=200", id)
	var first time.Duration
	for _, m := range []struct{ what, path string }{
		{"the page itself", fmt.Sprintf("/backfills/%d", id)},
		{"first 200 rows", base + "&position=0"},
		{"200 from the middle", fmt.Sprintf("%s&position=%d", base, n/2)},
		{"the last 200", fmt.Sprintf("%s&position=%d", base, n-200)},
		{"first 200 inserts", base + "&effect=insert&position=0"},
		{"200 inserts from the middle", fmt.Sprintf("%s&effect=insert&position=%d", base, n*91/200)},
		{"the last 200 inserts", fmt.Sprintf("%s&effect=insert&position=%d", base, n*91/100-200)},
		{"the last 200 overwrites", fmt.Sprintf("%s&effect=overwrite&position=%d", base, n*6/100-200)},
		{"the last 200 unknown", fmt.Sprintf("%s&effect=unknown&position=%d", base, n/100-200)},
		{"going to the last key", fmt.Sprintf("%s&from_key=%d", base, n+64230)},
		{"going to a key that is not there", base + "&from_key=0"},
	} {
		median, longest := s.took(m.path)
		fmt.Printf("%-34s %7.1f ms, at most %7.1f ms\n", m.what, ms(median), ms(longest))
		if m.what == "first 200 rows" {
			first = median
		}
		require.Less(t, median, 100*time.Millisecond, m.what)
		if first > 0 {
			require.Less(t, median, first*3/2+5*time.Millisecond, "%s is slower than the first", m.what)
		}
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// openPages is how many pages are open, of how many people.
const openPages, people = 200, 20

// TestMeasureOpenPages says what pages that are open and live cost the server.
func TestMeasureOpenPages(t *testing.T) {
	if !*measure {
		t.Skip("no -measure")
	}
	w := newWorld(t)
	id := w.request("public.attendance", backfill.InProgress)
	for i := range people {
		require.NoError(t, w.store.PutToken(t.Context(), "ada", fmt.Sprintf("person-%d", i), control.Reviewer, fmt.Sprintf("person-token-0123456789-%d", i)))
	}
	s := w.apart()
	ctx, cancel := context.WithCancel(t.Context())
	var open sync.WaitGroup
	var asked atomic.Int64
	for i := range openPages {
		path := []string{"/sites/maple", fmt.Sprintf("/backfills/%d", id)}[i%2]
		open.Go(func() { s.keepOpen(ctx, path, fmt.Sprintf("person-token-0123456789-%d", i/2%people), &asked) })
	}
	defer open.Wait()
	defer cancel()
	cost := func(what string, d time.Duration, each func()) {
		before, cpu := asked.Load(), s.cpu()
		begin := time.Now()
		for tick := time.NewTicker(time.Second); time.Since(begin) < d; <-tick.C {
			each()
		}
		share := float64(s.cpu()-cpu) / float64(time.Since(begin)) * 100
		fmt.Printf("%-34s %7.1f %% of one processor, %.0f pages a second\n", what, share, float64(asked.Load()-before)/time.Since(begin).Seconds())
		require.Less(t, share, 5.0, what)
	}
	require.Eventually(t, func() bool { return asked.Load() >= openPages }, time.Minute, 10*time.Millisecond)
	cost("200 pages, nothing happens", 40*time.Second, func() {})
	cost("200 pages, a walk goes on", 40*time.Second, func() {
		w.exec(fmt.Sprintf("request %d", id), `UPDATE backfill_control.request SET staged = staged + 5000 WHERE id = $1`, id)
	})
}

var streamOf = regexp.MustCompile(`<main [^>]*data-events="([^"]*)"`)

// keepOpen does what a page in a browser does: it listens, asks for itself when
// something has changed, at most once a second, and every fifteen seconds.
func (s *server) keepOpen(ctx context.Context, path, token string, asked *atomic.Int64) {
	jar, _ := cookiejar.New(nil)
	u, _ := url.Parse(s.url)
	jar.SetCookies(u, []*http.Cookie{{Name: "backfill_session", Value: s.session(token)}})
	// A browser keeps its connections: Go's default would open one for nearly each page.
	client := &http.Client{Jar: jar, Transport: &http.Transport{MaxIdleConnsPerHost: 6}}
	defer client.CloseIdleConnections()
	ask := func(path, header string) (io.ReadCloser, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
		if err != nil {
			return nil, err
		}
		if header != "" {
			r.Header.Set(header, "1")
		}
		res, err := client.Do(r)
		if err != nil {
			return nil, err
		}
		if res.StatusCode != http.StatusOK {
			return nil, errors.Join(fmt.Errorf("%s: %s", path, res.Status), res.Body.Close())
		}
		return res.Body, nil
	}
	load := func() string {
		body, err := ask(path, "Backfill-Fragment")
		if err != nil {
			if ctx.Err() == nil {
				s.t.Error(err)
			}
			return ""
		}
		defer body.Close()
		html, _ := io.ReadAll(body)
		asked.Add(1)
		if m := streamOf.FindSubmatch(html); m != nil {
			return strings.ReplaceAll(string(m[1]), "&amp;", "&")
		}
		return ""
	}
	changed := make(chan struct{}, 1)
	stream, err := ask(load(), "")
	if err != nil {
		s.t.Error(err)
		return
	}
	go func() {
		defer stream.Close()
		for lines := bufio.NewScanner(stream); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "event: change") {
				select {
				case changed <- struct{}{}:
				default:
				}
			}
		}
	}()
	every := time.NewTicker(15 * time.Second)
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-every.C:
		}
		time.Sleep(150*time.Millisecond + rand.N(150*time.Millisecond))
		load()
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}
