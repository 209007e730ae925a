package workflows

import (
	"fmt"
	"strconv"
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
		line("Paused. Send the signal `resume` with `{\"by\": \"NAME\"}` to go on.")
	case b.now.State == backfill.Pending:
		line("Waits for the agent of %s/%s.", b.in.Site, b.in.From)
	case b.now.State == backfill.InProgress:
		line("%s of about %s rows staged; the pending activity shows the resume key and the rate.", thousands(b.now.Staged), thousands(b.now.Expected))
	case b.now.State == backfill.AwaitingReview:
		line("%s rows wait for a person. Releasing them:", thousands(b.now.Staged))
		line("| inserts | overwrites | is identical | not judged yet |\n|--:|--:|--:|--:|\n| %s | %s | %s | %s |", thousands(b.now.Insert), thousands(b.now.Overwrite),
			thousands(b.now.Identical), thousands(b.now.Staged-b.now.Insert-b.now.Overwrite-b.now.Identical))
		line("To decide from here send the signal `approve` or `reject`, under your own name:\n\n```json\n{\"by\": \"your name\", \"revision\": %d, \"note\": \"\"}\n```", b.now.Revision)
	case b.now.State == backfill.Releasing:
		line("Approved by %s; %s of %s rows are released.", b.now.ReviewedBy, thousands(b.now.Released), thousands(b.now.Staged))
	default:
		line("%s staged, %s released, %s superseded, %s skipped as identical.", thousands(b.now.Staged), thousands(b.now.Released), thousands(b.now.Superseded), thousands(b.now.Skipped))
		if b.now.Unsent > 0 {
			line("%s of the superseded need another backfill: what overtook them was never delivered.", thousands(b.now.Unsent))
		}
	}
	if b.now.Reason != "" {
		line("Reason: %s", b.now.Reason)
	}
	if b.in.ReviewURL != "" {
		line("[Read the rows and decide](%s)", b.in.ReviewURL)
	}
	if b.ignored != "" {
		line("_%s_", b.ignored)
	}
	return s.String()
}

// thousands writes a number with separators.
func thousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
