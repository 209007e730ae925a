package ui

import (
	"fmt"
	"unicode"
	"unicode/utf8"

	"backfill/api"
	"backfill/internal/backfill"
	"backfill/internal/control"
)

// button is what stands at a table for its backfill: a way to ask for one, the
// reasons why not, or the way to the one that is open.
type button struct {
	look
	Label   string // the look's word with its figure
	Href    string // of the open request's page; "" when there is none
	Percent int
	Paused  bool
	Unmet   []string // what keeps it disabled
}

// openButton shows an open request.
func openButton(r *backfill.Request) button {
	b := button{look: looks[r.State], Href: fmt.Sprintf("/backfills/%d", r.ID), Percent: r.Percent(), Paused: r.Paused}
	b.Label = b.Word
	switch r.State {
	case backfill.AwaitingReview:
		b.Label = "Review " + num(r.Staged)
	case backfill.InProgress, backfill.Releasing:
		b.Label = fmt.Sprintf("%s %d %%", b.Word, b.Percent)
	}
	if r.Paused {
		b.Icon, b.Tone = "pause", "warn"
		b.Label += ", paused"
	}
	return b
}

// panelButton is the button of a table and direction for somebody.
func panelButton(p *backfill.Panel, a api.Account) button {
	if p.Open != nil {
		return openButton(p.Open)
	}
	b := button{Label: "Backfill"}
	for _, c := range backfill.Unmet(p.Conditions(false)) {
		b.Unmet = append(b.Unmet, c.Message)
	}
	if !a.Role.Covers(control.Requester) {
		b.Unmet = append(b.Unmet, lacks(a, control.Requester, "requesting a backfill"))
	}
	return b
}

// lacks says why an account may not do something.
func lacks(a api.Account, need control.Role, what string) string {
	return fmt.Sprintf("%s needs the role %s: you are %s", what, need, roleArticle(a.Role))
}

// rowButton is an open row backfill as it stands against its table.
type rowButton struct {
	button
	Key string
}

func rowButtons(open []*backfill.Request) []rowButton {
	out := make([]rowButton, len(open))
	for i, r := range open {
		out[i] = rowButton{openButton(r), shorten(r.Key.String())}
	}
	return out
}

// capitalise makes a message the beginning of a sentence.
func capitalise(s string) string {
	first, n := utf8.DecodeRuneInString(s)
	if n == 0 {
		return ""
	}
	return string(unicode.ToUpper(first)) + s[n:]
}
