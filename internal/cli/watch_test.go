package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"backfill/api/client"
)

func TestMain(m *testing.M) {
	client.Pace.Poll, client.Pace.Pause, client.Pace.LongestPause, client.Pace.Silence = 5*time.Millisecond, 5*time.Millisecond, 20*time.Millisecond, 300*time.Millisecond
	os.Exit(m.Run())
}

// events streams states, and then what comes after: nothing more, or the end of
// the connection.
func events(hold bool, states ...string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i, s := range states {
			fmt.Fprintf(w, ": keepalive\r\n\r\nid: v%d\nevent: backfill\ndata: %s\n\n", i+1, s)
			w.(http.Flusher).Flush()
		}
		fmt.Fprint(w, "event: end\ndata: {\"id\":7}\n\n")
		w.(http.Flusher).Flush()
		if hold {
			<-r.Context().Done()
		}
	}
}

func walking(staged int64) string {
	return strings.Replace(strings.Replace(in("IN_PROGRESS"), `"staged":600000`, fmt.Sprintf(`"staged":%d,"percent":%d,"rate":2500.4`, staged, staged/10_000), 1),
		`"eta":null`, `"eta":"2999-01-01T00:00:00Z"`, 1)
}

func TestWatch(t *testing.T) {
	noEnvironment(t)
	rejected := strings.Replace(in("REJECTED"), `"requested_by"`, `"review_note":"wrong\nrows","requested_by"`, 1)
	failed := strings.Replace(in("FAILED"), `"requested_by"`, `"reason":"column gone","requested_by"`, 1)
	unjudged := strings.Replace(waiting, `"insert":599000,"overwrite":1000,"identical":0,"unknown":0`, `"insert":500000,"overwrite":0,"identical":0,"unknown":100000`, 1)
	for _, c := range []struct {
		name   string
		args   string
		routes map[string]any
		status int
		out    []string // lines of standard output, without their times
		errs   []string
	}{{
		name: "until the rows can be read", args: "watch 7",
		routes: map[string]any{"GET /backfills/7/events": events(true, in("PENDING"), walking(420_000), waiting)},
		out:    []string{"PENDING", "IN_PROGRESS 42 %  420,000 of 1,000,000 rows  2,500/s  ", "AWAITING_REVIEW  600,000 rows to read"},
		errs:   []string{"backfill rows 7", "backfill approve 7", "http://host/backfills/7"},
	}, {
		name: "not at all when they can be read already", args: "watch 7",
		routes: map[string]any{"GET /backfills/7/events": events(true, waiting)},
		out:    []string{"AWAITING_REVIEW"}, errs: []string{"backfill approve 7"},
	}, {
		name: "until it is closed once it was approved", args: "watch 7",
		routes: map[string]any{"GET /backfills/7/events": events(false, in("RELEASING"), in("FINISHED"))},
		out:    []string{"RELEASING 0 %", "FINISHED"},
	}, {
		name: "until it is closed when they can be read already", args: "watch 7 --until closed",
		routes: map[string]any{"GET /backfills/7/events": events(false, waiting, in("RELEASING"), in("FINISHED"))},
		out:    []string{"AWAITING_REVIEW", "RELEASING 0 %  0 of 600,000 rows released", "FINISHED"},
	}, {
		name: "until review when that is past", args: "watch 7 --until review",
		routes: map[string]any{"GET /backfills/7/events": events(true, waiting)}, out: []string{"AWAITING_REVIEW"},
	}, {
		name: "until it is known what each would do", args: "watch 7 --until judged --json",
		routes: map[string]any{"GET /backfills/7/events": events(true, walking(1), unjudged, waiting)}, out: []string{walking(1), unjudged, waiting},
	}, {
		name: "until closed", args: "watch 7 --until closed", status: Failed,
		routes: map[string]any{"GET /backfills/7/events": events(true, walking(1), waiting, rejected)},
		out:    []string{"IN_PROGRESS", "AWAITING_REVIEW", "REJECTED"}, errs: []string{"backfill: request 7 is REJECTED: wrong; rows\n"},
	}, {
		name: "a failure", args: "watch 7", status: Failed,
		routes: map[string]any{"GET /backfills/7/events": events(true, failed)}, out: []string{"FAILED"}, errs: []string{"backfill: request 7 is FAILED: column gone\n"},
	}, {
		name: "for scripts each state once, verbatim", args: "watch 7 --json",
		routes: map[string]any{"GET /backfills/7/events": events(true, in("PENDING"), in("PENDING"), waiting)},
		out:    []string{in("PENDING"), waiting},
	}, {
		name: "without events", args: "watch 7",
		routes: map[string]any{"GET /backfills/7": inTurn(in("PENDING"), in("PENDING"), walking(20_000), waiting)},
		out:    []string{"PENDING", "IN_PROGRESS 2 %", "AWAITING_REVIEW"},
	}, {
		name: "with events held back by a proxy", args: "watch 7",
		routes: map[string]any{"GET /backfills/7": inTurn(in("PENDING"), waiting), "GET /backfills/7/events": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}},
		out: []string{"PENDING", "AWAITING_REVIEW"},
	}, {
		name: "with an API that is away now and then", args: "watch 7",
		routes: map[string]any{"GET /backfills/7": inTurn(in("PENDING"), "503", "503", waiting), "GET /backfills/7/events": refusal(503, "unavailable", "away")},
		out:    []string{"PENDING", "PENDING  the API is away, trying again", "AWAITING_REVIEW"},
	}, {
		name: "no such request", args: "watch 7", status: Failed,
		routes: map[string]any{"GET /backfills/7": refusal(404, "not_found", "no request 7"), "GET /backfills/7/events": refusal(404, "not_found", "no request 7")},
		errs:   []string{"backfill: no request 7\n"},
	}, {
		name: "a wrong token", args: "watch 7 --token wrong", status: Failed, errs: []string{"the token is wrong or revoked"},
	}, {
		name: "an end that is none", args: "watch 7 --until soon", status: Misused, errs: []string{"use review, judged or closed"},
	}, {
		name: "right after requesting", args: "request --site shop --table t.t --from a --watch",
		routes: map[string]any{"POST /sites/shop/backfills": in("PENDING"), "GET /backfills/7/events": events(true, in("PENDING"), waiting)},
		out:    []string{"request 7: ", "PENDING", "AWAITING_REVIEW"},
	}} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t, c.routes)
			t.Setenv("BACKFILL_API", f.URL)
			t.Setenv("BACKFILL_TOKEN", secret)
			status, out, errs := run(t, strings.Fields(c.args)...)
			require.Equal(t, c.status, status, "stdout: %s\nstderr: %s", out, errs)
			lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
			if c.out == nil {
				require.Empty(t, out)
				lines = nil
			}
			require.Len(t, lines, len(c.out), out)
			for i, want := range c.out {
				if line, ok := strings.CutPrefix(lines[i][min(len("15:04:05"), len(lines[i])):], "  "); ok {
					lines[i] = line
				}
				require.True(t, strings.HasPrefix(lines[i], want), "%q does not begin with %q", lines[i], want)
			}
			for _, want := range c.errs {
				require.Contains(t, errs, want)
			}
		})
	}
}

// The API goes away in the middle of watching, comes back, and is asked only for
// what was not seen.
func TestWatchSurvivesRestarts(t *testing.T) {
	noEnvironment(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/backfills/7/events", events(true, walking(10_000)))
	first := &http.Server{Handler: mux}
	go first.Serve(l)

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	out := &written{changed: make(chan struct{}, 1)}
	done := make(chan int)
	go func() {
		done <- Run(ctx, []string{"watch", "7", "--api", "http://" + address, "--token", secret}, out, io.Discard, &grammar{})
	}()
	out.await(t, ctx, "IN_PROGRESS 1 %")
	first.Close()
	out.await(t, ctx, "the API is away")

	f := newFake(t, map[string]any{"GET /backfills/7": walking(20_000), "GET /backfills/7/events": func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Last-Event-ID") != "v1" {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		events(true, waiting)(w, r)
	}})
	l, err = net.Listen("tcp", address)
	require.NoError(t, err)
	second := &http.Server{Handler: f.Config.Handler}
	defer second.Close()
	go second.Serve(l)
	require.Equal(t, OK, <-done)
	out.await(t, ctx, "AWAITING_REVIEW")
}

// written is an output that can be waited for.
type written struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{}
}

func (w *written) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case w.changed <- struct{}{}:
	default:
	}
	return w.b.Write(p)
}

func (w *written) await(t *testing.T, ctx context.Context, text string) {
	t.Helper()
	for {
		w.mu.Lock()
		found := strings.Contains(w.b.String(), text)
		w.mu.Unlock()
		if found {
			return
		}
		select {
		case <-w.changed:
		case <-ctx.Done():
			require.FailNow(t, "never written", text)
		}
	}
}

func TestWatchInterrupted(t *testing.T) {
	noEnvironment(t)
	ctx, cancel := context.WithCancel(t.Context())
	f := newFake(t, map[string]any{"GET /backfills/7/events": func(w http.ResponseWriter, r *http.Request) {
		time.AfterFunc(10*time.Millisecond, cancel)
		events(true, in("PENDING"))(w, r)
	}})
	var errs bytes.Buffer
	require.Equal(t, Failed, Run(ctx, []string{"watch", "7", "--api", f.URL, "--token", secret}, io.Discard, &errs, &grammar{}))
	require.Equal(t, "request 7 goes on, unwatched\nbackfill: interrupted\n", errs.String())
}

func answerOf(t *testing.T, text string) *client.Answer[client.Backfill] {
	a := &client.Answer[client.Backfill]{Raw: json.RawMessage(text)}
	require.NoError(t, json.Unmarshal(a.Raw, &a.Value))
	return a
}

func backfillOf(t *testing.T, text string) *client.Backfill { return &answerOf(t, text).Value }

func TestBar(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	b := backfillOf(t, walking(420_000))
	eta := now.Add(232 * time.Second)
	b.ETA = &eta
	hostile := *b
	hostile.Waiting = "replica lag\x1b]0;title\a of 漢字 \u202e12 s"
	paused := *b
	paused.Paused, paused.Waiting = true, "paused by ann"
	for _, c := range []struct {
		width   int
		b       *client.Backfill
		trouble string
		want    string
	}{
		{120, b, "", "IN_PROGRESS 42 %  [================                        ]  420,000 of 1,000,000 rows  2,500/s  3m52s left"},
		{80, b, "", "IN_PROGRESS 42 %  [=====       ]  420,000 of 1,000,000 rows  2,500/s  3m52s left"},
		{70, b, "", "IN_PROGRESS 42 %  420,000 of 1,000,000 rows  2,500/s  3m52s left"},
		{30, b, "", "IN_PROGRESS 42 %  420,000 of …"},
		{90, b, "no answer", "IN_PROGRESS 42 %  [=============                   ]  420,000 of 1,000,000 rows  no answer"},
		{78, &paused, "", "IN_PROGRESS 42 %, paused  420,000 of 1,000,000 rows  waiting: paused by ann"},
		{200, &hostile, "", `IN_PROGRESS 42 %  [================                        ]  420,000 of 1,000,000 rows  2,500/s  3m52s left  waiting: replica lag\x1b]0;title\a of 漢字 \u202e12 s`},
		{60, backfillOf(t, waiting), "", "AWAITING_REVIEW  600,000 rows to read"},
		{60, backfillOf(t, in("PENDING")), "", "PENDING"},
		{0, b, "", ""},
	} {
		got := bar(c.b, c.trouble, c.width, now)
		require.Equal(t, c.want, got)
		require.LessOrEqual(t, columns(got), c.width)
	}
}

func TestBarIsRedrawnInPlace(t *testing.T) {
	var out bytes.Buffer
	v := &barView{w: &out, width: func() int { return 40 }}
	v.tick() // nothing is known yet
	v.show(nil, "the API is away, trying again")
	v.show(answerOf(t, walking(10_000)), "")
	v.tick()
	v.show(answerOf(t, walking(20_000)), "")
	v.show(answerOf(t, waiting), "")
	v.end()
	v.end()
	require.Equal(t, "\r"+"the API is away, trying again\x1b[K"+
		"\rIN_PROGRESS 1 %  10,000 of 1,000,000 r…\x1b[K"+
		"\rIN_PROGRESS 1 %  10,000 of 1,000,000 r…\x1b[K"+
		"\rIN_PROGRESS 2 %  20,000 of 1,000,000 r…\x1b[K\n"+
		"\rAWAITING_REVIEW  600,000 rows to read\x1b[K\n", out.String())
}

// Mere progress makes a line only now and then.
func TestLines(t *testing.T) {
	var out bytes.Buffer
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	v := &lineView{out: printer{&out}, now: func() time.Time { return now }}
	for i := range int64(12) {
		v.show(answerOf(t, walking(10_000*(i+1))), "")
		now = now.Add(time.Second)
	}
	require.Equal(t, 3, strings.Count(out.String(), "\n"), out.String())
	b := answerOf(t, walking(130_000))
	b.Value.Waiting = "replica lag"
	v.show(b, "")
	v.show(b, "")
	require.Equal(t, 4, strings.Count(out.String(), "\n"))
	require.Contains(t, out.String(), "12:00:12  IN_PROGRESS 13 %  130,000 of 1,000,000 rows  2,500/s  ")
	require.Contains(t, out.String(), "waiting: replica lag\n")
}

func TestPhaseOfPaused(t *testing.T) {
	require.Equal(t, "RELEASING 3 %, paused", phase(&client.Backfill{State: client.StateReleasing, Percent: 3, Paused: true}))
}

// inTurn answers with one text after the other, and then with the last again; a
// number is the status of a problem.
func inTurn(texts ...string) func(http.ResponseWriter, *http.Request) {
	var n atomic.Int64
	return func(w http.ResponseWriter, _ *http.Request) {
		text := texts[min(int(n.Add(1))-1, len(texts)-1)]
		if text == "503" {
			refuse(w, 503, "unavailable", "away")
			return
		}
		io.WriteString(w, text)
	}
}
