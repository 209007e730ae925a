package activities

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/copypipe"
	"backfill/internal/side"
)

// Push sends this side's captured changes to the queue, turn after turn.
func (a *Agent) Push(ctx context.Context) error {
	// Nothing notifies the agent from within the application's transactions, so it
	// looks; one small query while there is nothing.
	return a.turns(ctx, nil, func() time.Duration { return a.Cycle }, func() (bool, error) {
		if !a.db.Captured(ctx) {
			a.trouble("changes cannot be pushed", nil) // there are none: the outbox could be read
			return false, nil
		}
		pushed, err := a.push(ctx)
		a.trouble("changes cannot be pushed", err)
		if pushed.rows > 0 {
			select {
			case a.pushedSome <- struct{}{}:
			default:
			}
		}
		return pushed.rows > 0, err
	})
}

// pushed is what one push came to.
type pushed struct {
	rows int64
	all  bool            // every record there was when it began has been looked at
	left map[string]bool // tables with records it could not push
}

// complete reports whether no record of a table is left that was visible before
// the push began.
func (p pushed) complete(table string) bool { return p.all && !p.left[table] }

// push sends one batch: which keys were touched, and each key's row as it is now.
// The order of its steps is what every guarantee rests on:
//
//  1. the direction's lock on the control database;
//  2. under it, one snapshot of the source: records, and the current rows of their keys;
//  3. a synchronous write on the source, so that what was read outlives a crash
//     (at the end of ReadOutbox);
//  4. the commit of the entries;
//  5. the deletion of exactly the records read.
//
// A crash between 4 and 5 pushes the keys again, read later.
func (a *Agent) push(ctx context.Context) (pushed, error) {
	out := pushed{left: map[string]bool{}}
	blocked := a.stillBlocked()
	for _, name := range blocked {
		out.left[name] = true
	}
	pending, err := a.db.Pending(ctx, a.BatchRows, blocked)
	out.all = pending.All
	tables := pending.Tables
	if err != nil || len(tables) == 0 {
		return out, err
	}
	if err := a.ready(ctx); err != nil {
		return out, err
	}
	p, err := a.store.BeginPush(ctx, a.Out)
	if err != nil {
		return out, err
	}
	defer p.Rollback()
	config, err := p.Tables(ctx)
	if err != nil {
		return out, err
	}
	var unknown []string
	tables = slices.DeleteFunc(tables, func(name string) bool {
		if config[name] == nil {
			unknown = append(unknown, name)
			return true
		}
		return false
	})
	if len(unknown) > 0 {
		// Just what was captured before it was seen that they are not configured.
		if err := a.db.Forget(ctx, unknown, pending.Last); err != nil {
			return out, err
		}
		if err := a.faults.at("push: forgotten"); err != nil {
			return out, err
		}
	}
	if len(tables) == 0 {
		return out, nil
	}
	if err := a.faults.at("push: locked"); err != nil {
		return out, err
	}
	var seqs []int64
	var unreadable bool
	read := func(o *side.Outbox) error {
		behind, err := p.Continues(ctx, o.Epoch, o.Batch, o.Nonce)
		if err != nil {
			return err
		}
		if behind {
			return errBehind
		}
		for name, why := range o.Unread {
			out.left[name] = true
			if why != "" {
				a.block(name, why)
			}
		}
		seqs = o.Seqs
		if err := a.faults.at("push: snapshot"); err != nil {
			return err
		}
		// Truncates go before the rows of any table, children before parents: emptying a
		// parent later could take rows of its children along.
		var sent []sending
		for _, t := range o.Tables {
			for _, c := range config[t.Name.String()] {
				sent = append(sent, sending{t, c})
			}
		}
		slices.SortStableFunc(sent, func(x, y sending) int { return y.to.ApplyOrder - x.to.ApplyOrder })
		for _, t := range sent {
			if t.Truncated && !t.to.TwoWay() {
				if err := p.Truncate(ctx, t.to.ID, o.Snapshot, !rulesOf(t.to).Delete); err != nil {
					return err
				}
			}
		}
		for _, t := range sent {
			if err := a.pushTable(ctx, p, o, t.OutboxTable, t.to.ID, rulesOf(t.to)); err != nil {
				if unreadable = side.Permanent(err); unreadable {
					a.block(t.Name.String(), message(err))
					out.left[t.Name.String()] = true
				}
				return fmt.Errorf("push %s: %w", t.Name, err)
			}
		}
		return a.faults.at("push: read")
	}
	reads, err := a.db.ReadOutbox(ctx, tables, a.BatchRows, read)
	if errors.Is(err, errBehind) {
		// The last push was committed and has not removed its records. It must not do so
		// once this one has read them: they are pushed again. Nor may the source fall
		// behind by two: then it would look restored.
		batch, nonce := p.Last()
		if err := a.db.Fence(ctx, batch, nonce, a.sent(ctx, nonce)); err != nil {
			return out, err
		}
		if err := a.faults.at("push: caught up"); err != nil {
			return out, err
		}
		reads, err = a.db.ReadOutbox(ctx, tables, a.BatchRows, read)
	}
	if unreadable {
		// The next push goes on without the table, and the agent's problem names it.
		out.all = false
		return out, nil
	}
	if err != nil {
		return out, err
	}
	if len(seqs) == 0 {
		return out, nil
	}
	if err := a.faults.at("push: durable"); err != nil {
		return out, err
	}
	nonce := rand.Text()
	batch, err := p.Commit(ctx, nonce, reads)
	if err != nil {
		return out, err
	}
	out.rows = p.Rows()
	if err := a.faults.at("push: committed"); err != nil {
		return out, err
	}
	var own func(io.Writer) error
	for _, tables := range config {
		if slices.ContainsFunc(tables, func(t backfill.Table) bool { return t.TwoWay() }) {
			own = a.sent(ctx, nonce)
		}
	}
	if err := a.db.DeletePushed(ctx, seqs, batch, nonce, own); err != nil {
		return out, err
	}
	return out, a.faults.at("push: deleted")
}

// sending is a table of the source and one that it is sent to.
type sending struct {
	side.OutboxTable
	to backfill.Table
}

// errBehind says that the source does not know its last push yet.
var errBehind = errors.New("the last push was committed and has not removed its records")

// sent writes what a push has sent of tables captured on both sides, for this side
// to know as its own changes.
func (a *Agent) sent(ctx context.Context, nonce string) func(io.Writer) error {
	return func(w io.Writer) error { return a.store.CopySent(ctx, a.Out.ID, nonce, w) }
}

// rulesOf says what of a table's changes is sent.
func rulesOf(t backfill.Table) side.Rules {
	return side.Rules{Create: t.Active && t.Create, Update: t.Active && t.Update, Delete: t.Active && t.Delete, TwoWay: t.TwoWay()}
}

func (a *Agent) pushTable(ctx context.Context, p *control.Push, o *side.Outbox, t side.OutboxTable, tableID int32, rules side.Rules) error {
	if t.Gap {
		if err := p.Gap(ctx, tableID, t.GapXID, "a partition was truncated, the key changed, or capture was broken until setup repaired it: which rows that touched was not recorded; request another backfill and reconcile"); err != nil {
			return err
		}
	}
	if t.Truncated && rules.TwoWay {
		if err := p.Gap(ctx, tableID, 0, "the table was truncated, which is not sent of a table captured on both sides: delete its rows instead, or request another backfill, and reconcile"); err != nil {
			return err
		}
	}
	if t.Capture != "" {
		if err := p.Broken(ctx, tableID, t.Capture); err != nil {
			return err
		}
	}
	if err := p.Shape(ctx, tableID, t.Shape); err != nil {
		return err
	}
	if !t.Keys {
		return nil
	}
	layoutID, err := p.PutLayout(ctx, t.Layout)
	if err != nil {
		return err
	}
	if err := a.faults.at("push: layout recorded"); err != nil {
		return err
	}
	return copypipe.Run(
		func(w io.Writer) error { return o.CopyEntries(ctx, t, a.Out.ID, tableID, layoutID, rules, w) },
		func(r io.Reader) error { return p.Copy(ctx, r) })
}

// block leaves a table's changes in its outbox for a while: one table that cannot
// be read must not hold up the others.
func (a *Agent) block(table, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.blocked[table] = blocked{until: time.Now().Add(15 * time.Second), why: why}
}

// stillBlocked lists the tables left alone for now.
func (a *Agent) stillBlocked() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	names := []string{}
	for name, b := range a.blocked {
		if time.Now().Before(b.until) {
			names = append(names, name)
		} else {
			delete(a.blocked, name)
		}
	}
	return names
}
