package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// What is measured of a backfill, in the order of the table.
const (
	wholeName   = "**Backfill**, from request to drained"
	walkName    = "Backfill: walk into staging"
	effectsName = "Backfill: effects classified, from the walk's start"
	releaseName = "Backfill: release"
	applyName   = "Backfill: apply"
)

// ours measures backfills of a workload: one as it is used, approved by a script at once; and, where the receiver is empty,
// one whose steps run apart from each other.
func (b *bench) ours(ctx context.Context, w workload, h holding, group string) error {
	if err := b.ready(ctx, w, h); err != nil {
		return err
	}
	r, err := b.through(ctx, w, group)
	if err != nil || h != empty {
		return err
	}
	if w.name == orders.name {
		if err := b.footprint(ctx, r); err != nil {
			return err
		}
	}
	return b.steps(ctx, w, group)
}

func (b *bench) ready(ctx context.Context, w workload, h holding) error {
	return errors.Join(b.hold(ctx, w, h), b.product.clear(ctx), b.settle(ctx))
}

// through is a backfill from request to drained.
func (b *bench) through(ctx context.Context, w workload, group string) (backfill, error) {
	r, err := b.product.request(ctx, w.name, "full")
	if err != nil {
		return r, err
	}
	if r, err = b.product.reviewable(ctx, r.ID); err != nil {
		return r, err
	}
	if err := b.product.approve(ctx, r); err != nil {
		return r, err
	}
	if r, err = b.product.finished(ctx, r.ID); err != nil {
		return r, err
	}
	at, _, err := b.product.drained(ctx)
	if err != nil {
		return r, err
	}
	b.report.took(group, wholeName, at.Sub(r.RequestedAt))
	b.say("%s, Backfill: %.2f s from request to drained; walk began after %.2f s and took %.2f s, approved %.2f s later, released in %.2f s, drained %.2f s later", group,
		at.Sub(r.RequestedAt).Seconds(), r.StartedAt.Sub(r.RequestedAt).Seconds(), r.WalkedAt.Sub(*r.StartedAt).Seconds(), r.ReviewedAt.Sub(*r.WalkedAt).Seconds(),
		r.ClosedAt.Sub(*r.ReviewedAt).Seconds(), at.Sub(*r.ClosedAt).Seconds())
	return r, errors.Join(b.arrived(ctx, w), b.explained(ctx))
}

// steps measures walk and effects, which run side by side, then the release with the receiver's agent stopped, then the
// apply of all that was released.
func (b *bench) steps(ctx context.Context, w workload, group string) error {
	if err := b.ready(ctx, w, empty); err != nil {
		return err
	}
	p := b.product
	r, err := p.request(ctx, w.name, "full")
	if err != nil {
		return err
	}
	if r, err = p.until(ctx, r.ID, "judged", func(r backfill) bool {
		return r.State == "AWAITING_REVIEW" && r.Effects["insert"]+r.Effects["overwrite"]+r.Effects["identical"] == r.Staged
	}); err != nil {
		return err
	}
	judged := time.Now()
	p.halt(receiverAgent)
	if err := errors.Join(b.settle(ctx), p.missed(ctx, receiver), p.approve(ctx, r)); err != nil {
		return err
	}
	if r, err = p.finished(ctx, r.ID); err != nil {
		return err
	}
	if err := errors.Join(b.settle(ctx), p.start(receiverAgent)); err != nil {
		return err
	}
	_, apply, err := p.drained(ctx)
	if err != nil {
		return err
	}
	b.report.took(group, walkName, r.WalkedAt.Sub(*r.StartedAt))
	b.report.took(group, effectsName, judged.Sub(*r.StartedAt))
	b.report.took(group, releaseName, r.ClosedAt.Sub(*r.ReviewedAt))
	if apply > 0 { // else it was a single batch
		b.report.took(group, applyName, apply)
	}
	b.say("%s, Backfill: walk %.2f s, effects %.2f s, release %.2f s, apply %.2f s", group,
		r.WalkedAt.Sub(*r.StartedAt).Seconds(), judged.Sub(*r.StartedAt).Seconds(), r.ClosedAt.Sub(*r.ReviewedAt).Seconds(), apply.Seconds())
	return errors.Join(b.arrived(ctx, w), b.explained(ctx))
}

// footprint notes what a backfill has left in Temporal and how much memory the processes have had.
func (b *bench) footprint(ctx context.Context, r backfill) error {
	events, err := b.product.history(ctx, r.WorkflowID)
	if err != nil {
		return err
	}
	b.report.figure("Temporal history", "events of a backfill, for a million rows", fmt.Sprintf("%.0f", float64(events)/float64(r.Staged)*1e6))
	return b.memory(r.Staged)
}

func (b *bench) memory(rows int64) error {
	peak, err := b.product.memory()
	if err != nil {
		return err
	}
	for _, what := range slices.Sorted(maps.Keys(peak)) {
		b.report.figure(fmt.Sprintf("Memory at its peak, after %d rows", rows), what, fmt.Sprintf("%d MiB, %d at the start", peak[what], b.product.began[what]))
	}
	return nil
}
