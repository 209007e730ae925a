package activities

import (
	"context"
	"time"

	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/proof"
)

const (
	// leavesAtOnce bounds how many leaves are read beyond the first that differs.
	leavesAtOnce = 32
	// answerWithin is how long the receiver's agent may take over a round of leaves:
	// a walk does not wait for an agent that is away, or far behind.
	answerWithin = 20 * time.Second
)

// prove looks for the resume point before a walk's first page: it hashes leaf after
// leaf on the source, in rounds that grow, lets the receiver's agent compare each at a
// position that has everything the leaf saw, and settles that the walk begins after the
// last leaf before the first that differs. A highest key alone proves nothing.
func (w *walk) prove(ctx context.Context, stopping <-chan struct{}) error {
	r := w.req
	if w.mapped || r.ProofAt != nil || r.Mode != backfill.ModeFull || r.UpperKey == nil || r.ResumeKey != nil || r.Staged > 0 || r.Expected < int64(w.LeafRows) {
		return nil
	}
	var proven backfill.Key
	var rows int64
	for n, round := 0, 1; ; round = min(round*2, leavesAtOnce) {
		leaves, last, err := w.round(ctx, proven, n, round, stopping)
		if err != nil {
			return err
		}
		if len(leaves) == 0 {
			break
		}
		if err := w.store.AskLeaves(ctx, w.lease, leaves, n == 0); err != nil {
			return err
		}
		all, err := w.answers(ctx, n, len(leaves), stopping)
		if err != nil {
			return err
		}
		equal := 0
		for _, f := range all {
			if f.Equal == nil || !*f.Equal {
				break
			}
			equal, proven, rows = equal+1, f.UpTo, rows+f.Rows
		}
		if n += len(leaves); equal < len(leaves) || last {
			break
		}
	}
	select {
	case <-stopping:
		return nil // whoever comes next looks again
	default:
	}
	if err := w.store.Proven(ctx, w.lease, proven, rows); err != nil {
		return err
	}
	req, err := w.store.Request(ctx, r.ID)
	if err != nil {
		return err
	}
	w.req, w.keeper.req = req, req
	return nil
}

// round hashes the next leaves on the source and pushes until nothing that they saw
// in the outbox is left. last says that the table ends with them.
func (w *walk) round(ctx context.Context, after backfill.Key, n, size int, stopping <-chan struct{}) (leaves []control.Leaf, last bool, err error) {
	for len(leaves) < size && !last {
		pass, err := w.keeper.pass(ctx, stopping)
		if err != nil {
			return nil, false, err
		}
		if !pass {
			select {
			case <-stopping:
				return nil, true, nil
			default:
				continue
			}
		}
		leaf, _, err := w.db.NextLeaf(ctx, w.table, w.layout, w.req.Shape, after, w.req.UpperKey, w.LeafRows)
		if err != nil {
			return nil, false, err
		}
		last = leaf.Count < int64(w.LeafRows)
		if leaf.Count == 0 {
			break
		}
		leaves = append(leaves, control.Leaf{N: int32(n + len(leaves)), After: leaf.Lower, UpTo: leaf.Upper, Rows: leaf.Count, Digest: leaf.Digest})
		after = leaf.Upper
	}
	for {
		p, err := w.push(ctx)
		if err != nil {
			return nil, false, err
		}
		if p.complete(w.table) {
			break
		}
		if p.left[w.table] {
			return nil, true, nil // it cannot be pushed now, so nothing can be proven
		}
	}
	seq, err := w.store.LastSeq(ctx, w.Out.ID)
	for i := range leaves {
		leaves[i].Seq = seq
	}
	return leaves, last, err
}

// answers waits until the receiver's agent has compared all of a round, found one that
// differs, or taken too long.
func (w *walk) answers(ctx context.Context, from, count int, stopping <-chan struct{}) (round []control.Leaf, err error) {
	for end := time.Now().Add(w.AnswerWithin); ; {
		all, err := w.store.Leaves(ctx, w.req.ID, false)
		if err != nil {
			return nil, err
		}
		done, differs := 0, false
		round = all[min(from, len(all)):]
		for _, f := range round {
			if f.Equal != nil {
				done++
				differs = differs || !*f.Equal
			}
		}
		if done == count || differs || time.Now().After(end) {
			return round, nil
		}
		if err := w.store.MayGo(ctx, w.req.ID, w.lease); err != nil {
			return nil, err
		}
		select {
		case <-stopping:
			return nil, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// compare answers what the source's agent asks of leaves, as far as this side has
// applied what they have seen.
func (a *Agent) compare(ctx context.Context, req *backfill.Request) error {
	leaves, err := a.store.Leaves(ctx, req.ID, true)
	if err != nil || len(leaves) == 0 {
		return err
	}
	r, err := a.store.Request(ctx, req.ID)
	if err != nil {
		return err
	}
	layout, err := a.store.Layout(ctx, r.LayoutID)
	if err != nil {
		return err
	}
	for _, f := range leaves {
		here, position, err := a.db.LeafHere(ctx, req.Table, layout, f.After, f.UpTo)
		if err != nil {
			return err
		}
		if position < f.Seq {
			return nil // not yet: it would be found different for what is on its way
		}
		equal := here.Same(proof.Leaf{Count: f.Rows, Digest: f.Digest})
		if err := a.store.AnswerLeaf(ctx, req.ID, f, equal); err != nil {
			return err
		}
		if !equal {
			return nil // what comes after it is of no use
		}
	}
	return nil
}
