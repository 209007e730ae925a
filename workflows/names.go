// Package workflows holds the deterministic workflows. This file has every name
// that crosses a process boundary: task queues, workflow ids, signals, updates,
// queries, search attributes and their payloads.
package workflows

import (
	"go.temporal.io/sdk/temporal"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

// ControlQueue is the task queue of all workflows and control activities.
const ControlQueue = "backfill-control"

// AgentQueue is the task queue of the activities beside one side's database.
func AgentQueue(site, side string) string { return "agent/" + site + "/" + side }

// SyncID is the id of the workflow that keeps one side's agent cycling.
func SyncID(site, side string) string { return "sync/" + site + "/" + side }

// ShadowReadID is the id of the workflow that keeps one side's agent judging shadow reads.
func ShadowReadID(site, side string) string { return "shadow/" + site + "/" + side }

// SweepID is the id of the one workflow that brings requests and workflows together.
const SweepID = "sweep"

// RetentionID is the id of the schedule that removes what is past its window.
const RetentionID = "retention"

// Signals and updates of a Backfill workflow. The API uses the updates, which
// answer; scripts and the console may send the signals of the same names.
const (
	Approve = "approve" // Decision
	Reject  = "reject"  // Decision
	Pause   = "pause"   // By
	Resume  = "resume"  // By
	Cancel  = "cancel"  // By
	Judge   = "judge"   // By: judge the effects of the staged rows again
	Refresh = "refresh" // no payload, signal only: the request was changed elsewhere
	Status  = "status"  // query, answers BackfillStatus
)

// Decision is the payload of approve and reject.
type Decision struct {
	By            string `json:"by"`
	Revision      int64  `json:"revision"`
	Note          string `json:"note"`
	SkipIdentical bool   `json:"skip_identical,omitempty"`

	// Origin is for the audit. The API says it; of a signal it is not believed.
	Origin control.Origin `json:"origin,omitzero"`
}

// By is the payload of pause, resume and cancel.
type By struct {
	By   string `json:"by"`
	Note string `json:"note,omitempty"`

	Origin control.Origin `json:"origin,omitzero"` // as of Decision
}

// BackfillInput starts a Backfill workflow. It names the request; everything else
// is in the control database, and no row data ever enters Temporal.
type BackfillInput struct {
	RequestID int64  `json:"request_id"`
	Site      string `json:"site"`
	Table     string `json:"table"`
	From      string `json:"from"`
	To        string `json:"to"`
	Row       bool   `json:"row,omitempty"`
	ReviewURL string `json:"review_url,omitempty"` // shown in the console's current details
}

// BackfillStatus answers the status query, and is the workflow's result.
type BackfillStatus struct {
	RequestID  int64          `json:"request_id"`
	State      backfill.State `json:"state"`
	Paused     bool           `json:"paused,omitempty"`
	Staged     int64          `json:"staged"`
	Released   int64          `json:"released"`
	Superseded int64          `json:"superseded"`
	Revision   int64          `json:"revision"`
	ReviewedBy string         `json:"reviewed_by,omitempty"`
	Reason     string         `json:"reason,omitempty"`
}

// ReconcileInput starts a Reconcile workflow. It names the run; everything else is
// in the control database.
type ReconcileInput struct {
	ID    int64  `json:"id"`
	Site  string `json:"site"`
	Table string `json:"table"`
	From  string `json:"from"`
	To    string `json:"to"`
}

// Search attributes of Backfill and Reconcile workflows.
var (
	SiteAttribute  = temporal.NewSearchAttributeKeyKeyword("BackfillSite")
	TableAttribute = temporal.NewSearchAttributeKeyKeyword("BackfillTable")
	FromAttribute  = temporal.NewSearchAttributeKeyKeyword("BackfillFrom")
	StateAttribute = temporal.NewSearchAttributeKeyKeyword("BackfillState")
	RowsAttribute  = temporal.NewSearchAttributeKeyInt64("BackfillRows")

	SearchAttributes = []temporal.SearchAttributeKey{SiteAttribute, TableAttribute, FromAttribute, StateAttribute, RowsAttribute}
)

// Types of application errors that cross from activities through workflows to
// the API. They are the domain's codes.
const (
	ErrConflict  = string(backfill.Conflict)
	ErrInvalid   = string(backfill.Invalid)
	ErrNotFound  = string(backfill.NotFound)
	ErrRefused   = string(backfill.Refused)
	ErrForbidden = string(backfill.Forbidden)
)
