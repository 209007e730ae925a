package workflows

import (
	"fmt"
	"strings"

	"backfill/internal/backfill"
)

// details is what an operator reads on the run's page in the console, in Markdown.
func (b *run) details() string {
	var s strings.Builder
	line := func(format string, args ...any) { s.WriteString(fmt.Sprintf(format, args...) + "\n\n") }
	line("**%s** — %s of site %s, %s → %s", b.now.State, b.in.Table, b.in.Site, b.in.From, b.in.To)
	switch {
	case b.now.Paused:
		line("Paused. Send `resume` to go on.")
	case b.now.State == backfill.Pending:
		line("Waits for the agent of %s/%s.", b.in.Site, b.in.From)
	case b.now.State == backfill.InProgress:
		line("%d of about %d rows staged; the pending activity shows the resume key and the rate.", b.now.Staged, b.now.Expected)
	case b.now.State == backfill.AwaitingReview:
		line("%d rows wait for a person: %d inserts, %d overwrites, %d identical.", b.now.Staged, b.now.Insert, b.now.Overwrite, b.now.Identical)
		line("To decide from here send the signal `approve` or `reject` with\n\n```json\n{\"by\": \"your name\", \"revision\": %d, \"note\": \"\"}\n```", b.now.Revision)
	case b.now.State == backfill.Releasing:
		line("Approved by %s; %d of %d rows are through.", b.now.ReviewedBy, b.now.Released, b.now.Staged)
	default:
		line("%d staged, %d released, %d superseded.", b.now.Staged, b.now.Released, b.now.Superseded)
	}
	if b.now.Reason != "" {
		line("Reason: %s", b.now.Reason)
	}
	if b.in.ReviewURL != "" {
		line("[Open the request](%s)", b.in.ReviewURL)
	}
	if b.ignored != "" {
		line("_%s_", b.ignored)
	}
	return s.String()
}
