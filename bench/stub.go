package main
import "context"
func bucardoMissing() error { return missing("not installed") }
func (b *bench) live(ctx context.Context) error { return nil }
func (b *bench) trigger(ctx context.Context) error { return nil }
func (b *bench) proof(ctx context.Context) error { return nil }
func (b *bench) review(ctx context.Context) error { return nil }
func (b *bench) idle(ctx context.Context) error { return nil }
func (b *bench) steady(ctx context.Context) error { return nil }
