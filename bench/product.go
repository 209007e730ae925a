package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.temporal.io/sdk/client"

	"backfill/activities"
	"backfill/internal/control"
	"backfill/internal/local"
	"backfill/internal/side"
)

// The site of every measurement. Changes go from source to receiver.
const site, source, receiver = "bench", "source", "receiver"

// product is the program under test, a process a role as in production, with a Temporal of its own.
type product struct {
	b        *bench
	url      string
	token    string
	temporal *local.Temporal
	client   client.Client
	roles    map[string]*process
	store    *control.Store
	counters []*activities.Agent // count the tables at once, where the processes would do so within half a minute
	sides    []*side.DB
	began    map[string]int // the most memory each process had had when all were at work, in MiB
}

// The roles of the program.
const apiRole, controlRole, sourceAgent, receiverAgent = "api", "control worker", "agent of source", "agent of receiver"

var roles = []string{apiRole, controlRole, sourceAgent, receiverAgent}

func startProduct(ctx context.Context, b *bench) (p *product, err error) {
	p = &product{b: b, roles: map[string]*process{}}
	if p.temporal, err = local.StartTemporal(ctx, local.TemporalOptions{Dir: filepath.Join(b.dir, "temporal")}); err != nil {
		return p, err
	}
	if p.client, err = client.Dial(client.Options{HostPort: p.temporal.HostPort}); err != nil {
		return p, err
	}
	if _, err := p.program(ctx, "migrate", "--control", b.control.dsn); err != nil {
		return p, err
	}
	if p.store, err = control.Open(ctx, b.control.dsn); err != nil {
		return p, err
	}
	if err := p.store.CreateSite(ctx, "bench", site, [2]string{source, receiver}); err != nil {
		return p, err
	}
	token, err := p.program(ctx, "token", "create", "bench", "--role", "admin", "--control", b.control.dsn)
	if err != nil {
		return p, err
	}
	p.token = strings.TrimSpace(token)
	for name, db := range map[string]*database{source: b.source, receiver: b.receiver} {
		if err := p.setup(ctx, name, db); err != nil {
			return p, err
		}
		beside, err := side.Open(ctx, site, name, db.dsn)
		if err != nil {
			return p, err
		}
		p.sides = append(p.sides, beside)
		agent, err := activities.NewAgent(ctx, p.store, beside, "bench", activities.Settings{})
		if err != nil {
			return p, err
		}
		p.counters = append(p.counters, agent)
	}
	for _, role := range roles {
		if err := p.start(role); err != nil {
			return p, err
		}
	}
	if err := await(ctx, "the agents to be at work", func() (bool, error) {
		var shown struct{ Sides []struct{ Agent *string } }
		if err := p.call(ctx, http.MethodGet, "/sites/"+site, nil, &shown); err != nil {
			return false, ctx.Err() // the API is not there yet
		}
		return !slices.ContainsFunc(shown.Sides, func(s struct{ Agent *string }) bool { return s.Agent == nil }), p.alive()
	}); err != nil {
		return p, err
	}
	p.began, err = p.memory()
	return p, err
}

// program runs a command of the program to its end.
func (p *product) program(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, p.b.program, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("backfill %s: %w: %.500s", args[0], err, out)
	}
	return string(out), nil
}

func (p *product) setup(ctx context.Context, name string, db *database) error {
	_, err := p.program(ctx, "setup", "--site", site, "--side", name, "--control", p.b.control.dsn, "--database", db.dsn)
	return err
}

// start starts the process of a role.
func (p *product) start(role string) (err error) {
	engine := []string{"--temporal", p.temporal.HostPort}
	var args []string
	switch role {
	case apiRole:
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		p.url = "http://" + listener.Addr().String()
		if err := listener.Close(); err != nil {
			return err
		}
		args = []string{"api", "--control", p.b.control.dsn, "--listen", strings.TrimPrefix(p.url, "http://")}
	case controlRole:
		args = []string{"worker", "--control", "--control-database", p.b.control.dsn}
	case sourceAgent:
		args = []string{"worker", "--agent", site + "/" + source, "--database", p.b.source.dsn, "--control-database", p.b.control.dsn}
	case receiverAgent:
		args = []string{"worker", "--agent", site + "/" + receiver, "--database", p.b.receiver.dsn, "--control-database", p.b.control.dsn}
	}
	p.roles[role], err = launch(filepath.Join(p.b.dir, strings.ReplaceAll(role, " ", "-")+".log"), p.b.program, append(args, engine...)...)
	return err
}

// halt ends the process of a role.
func (p *product) halt(role string) {
	p.roles[role].end()
	delete(p.roles, role)
}

// missed waits until a side's agent, which was halted, is held to be away: until then a release waits for it.
func (p *product) missed(ctx context.Context, name string) error {
	return await(ctx, "the agent of "+name+" to be missed", func() (away bool, err error) {
		err = p.b.control.QueryRow(ctx, `SELECT agent_seen_at < clock_timestamp() - interval '16 s' FROM backfill_control.side WHERE site = $1 AND name = $2`, site, name).Scan(&away)
		return away, err
	})
}

func (p *product) alive() error {
	for role, process := range p.roles {
		select {
		case <-process.ended:
			return fmt.Errorf("the %s has ended: %s", role, process.last())
		default:
		}
	}
	return nil
}

func (p *product) stop(ctx context.Context) (err error) {
	for role := range p.roles {
		p.halt(role)
	}
	for _, db := range p.sides {
		db.Close()
	}
	if p.store != nil {
		p.store.Disconnect()
	}
	if p.client != nil {
		p.client.Close()
	}
	if p.temporal != nil {
		err = p.temporal.Stop(ctx)
	}
	return err
}

// capture configures a table that is on both sides, and sets its capture up.
func (p *product) capture(ctx context.Context, table string) error {
	if err := p.call(ctx, http.MethodPut, "/sites/"+site+"/tables/public."+table, map[string]any{"captured_from": []string{source}}, nil); err != nil {
		return err
	}
	return errors.Join(p.setup(ctx, source, p.b.source), p.setup(ctx, receiver, p.b.receiver))
}

// clear forgets staged rows and history, so that each run finds the control database as the first one did, and counts the tables.
func (p *product) clear(ctx context.Context) error {
	if err := p.b.control.exec(ctx, `TRUNCATE backfill_control.staged, backfill_control.effect, backfill_control.judged, backfill_control.entry, backfill_control.progress`); err != nil {
		return err
	}
	return p.count(ctx)
}

func (p *product) count(ctx context.Context) error {
	for _, agent := range p.counters {
		if err := agent.CountNow(ctx); err != nil {
			return err
		}
	}
	return nil
}

// call asks the API and reads its answer into to, unless that is nil.
func (p *product) call(ctx context.Context, method, path string, body, to any) error {
	var payload io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		payload = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, p.url+"/api/v1"+path, payload)
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "Bearer "+p.token)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %.500s", method, path, answer.Status, text)
	}
	if err != nil || to == nil {
		return err
	}
	return json.Unmarshal(text, to)
}

// backfill is a request as the API shows it.
type backfill struct {
	ID          int64
	State       string
	Expected    int64
	Staged      int64
	Effects     map[string]int64
	Revision    int64
	Reason      string
	WorkflowID  string     `json:"workflow_id"`
	RequestedAt time.Time  `json:"requested_at"`
	StartedAt   *time.Time `json:"started_at"`
	WalkedAt    *time.Time `json:"walked_at"`
	ReviewedAt  *time.Time `json:"reviewed_at"`
	ClosedAt    *time.Time `json:"closed_at"`
}

// request asks for a backfill.
func (p *product) request(ctx context.Context, table, mode string) (r backfill, err error) {
	err = p.call(ctx, http.MethodPost, "/sites/"+site+"/backfills", map[string]any{"table": "public." + table, "from": source, "mode": mode}, &r)
	return r, err
}

// until waits for a state of a request.
func (p *product) until(ctx context.Context, id int64, what string, holds func(backfill) bool) (r backfill, err error) {
	// What happens is timed by the control database: asking is to cost nobody anything.
	err = awaitEvery(ctx, 100*time.Millisecond, fmt.Sprintf("backfill %d to be %s", id, what), func() (bool, error) {
		if err := errors.Join(p.alive(), p.call(ctx, http.MethodGet, fmt.Sprintf("/backfills/%d", id), nil, &r)); err != nil {
			return false, err
		}
		if r.State == "FAILED" {
			return false, fmt.Errorf("backfill %d failed: %s", id, r.Reason)
		}
		return holds(r), nil
	})
	return r, err
}

func (p *product) reviewable(ctx context.Context, id int64) (backfill, error) {
	return p.until(ctx, id, "reviewable", func(r backfill) bool { return r.State == "AWAITING_REVIEW" })
}

func (p *product) finished(ctx context.Context, id int64) (backfill, error) {
	return p.until(ctx, id, "finished", func(r backfill) bool { return r.State == "FINISHED" })
}

func (p *product) approve(ctx context.Context, r backfill) error {
	return p.call(ctx, http.MethodPost, fmt.Sprintf("/backfills/%d/approve", r.ID), map[string]any{"revision": r.Revision}, nil)
}

func (p *product) reject(ctx context.Context, r backfill) error {
	return p.call(ctx, http.MethodPost, fmt.Sprintf("/backfills/%d/reject", r.ID), map[string]any{"revision": r.Revision, "note": "measured"}, nil)
}

// drained waits until the receiver has applied everything that is in the queue now. It tells when that was, and how long it
// took from the first batch on: the acknowledgements of n batches are n-1 batches apart.
func (p *product) drained(ctx context.Context) (at time.Time, apply time.Duration, err error) {
	var direction int32
	var first, last int64
	if err := p.b.control.QueryRow(ctx, `
		SELECT d.id, coalesce((SELECT seq FROM backfill_control.entry WHERE direction = d.id ORDER BY seq LIMIT 1), 0), coalesce((SELECT seq FROM backfill_control.entry WHERE direction = d.id ORDER BY seq DESC LIMIT 1), 0)
		  FROM backfill_control.direction d WHERE d.from_side = $1`, source).Scan(&direction, &first, &last); err != nil {
		return at, 0, err
	}
	if err := await(ctx, "the queue to be empty", func() (drained bool, err error) {
		err = p.b.control.QueryRow(ctx, `SELECT applied_seq >= $2 FROM backfill_control.direction WHERE id = $1`, direction, last).Scan(&drained)
		return drained, errors.Join(err, p.alive())
	}); err != nil {
		return at, 0, err
	}
	var seconds float64
	err = p.b.control.QueryRow(ctx, `
		SELECT min(at) FILTER (WHERE seq >= $3), coalesce(extract(epoch FROM max(at) - min(at)) * count(*) / nullif(count(*) - 1, 0), 0)
		  FROM backfill_control.ack WHERE direction = $1 AND seq >= $2`, direction, first, last).Scan(&at, &seconds)
	return at, time.Duration(seconds * float64(time.Second)), err
}

// history is how many events a workflow has in Temporal.
func (p *product) history(ctx context.Context, workflowID string) (int64, error) {
	d, err := p.client.DescribeWorkflowExecution(ctx, workflowID, "")
	if err != nil {
		return 0, err
	}
	return d.WorkflowExecutionInfo.HistoryLength, nil
}

// process is a process of the program.
type process struct {
	cmd   *exec.Cmd
	log   string
	ended chan struct{}
}

func launch(log, program string, args ...string) (*process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	p := &process{cmd: exec.Command(program, args...), log: log, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

func (p *process) end() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(20 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// last is the end of what the process has said.
func (p *process) last() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-1000):])
}

// memory is the most memory that a process ever had resident, in MiB.
func memory(pid int) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.Fields(rest)[0])
			return kib / 1024, err
		}
	}
	return 0, fmt.Errorf("/proc/%d/status does not tell VmHWM", pid)
}

// processor is how much processor time a process has taken.
func processor(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// pid (program) state …, where the program may contain anything; ticks are a hundredth of a second.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err1, err2)
}

// memory is the most memory that each process ever had resident, in MiB.
func (p *product) memory() (map[string]int, error) {
	all := map[string]int{}
	for what, pid := range p.pids() {
		mib, err := memory(pid)
		if err != nil {
			return nil, err
		}
		all[what] = mib
	}
	return all, nil
}

// pids are the processes of the program, and Temporal's, by what they are.
func (p *product) pids() map[string]int {
	all := map[string]int{"Temporal": p.temporal.PID()}
	for role, process := range p.roles {
		all[role] = process.cmd.Process.Pid
	}
	return all
}
