package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"backfill/internal/backfill"
)

// Backfill is a request as the API shows it.
type Backfill struct {
	ID                    int64                     `json:"id"`
	Site                  string                    `json:"site"`
	Table                 string                    `json:"table"`
	From                  string                    `json:"from"`
	To                    string                    `json:"to"`
	Mode                  backfill.Mode             `json:"mode"`
	Key                   backfill.Key              `json:"key"`
	State                 backfill.State            `json:"state"`
	Paused                bool                      `json:"paused"`
	Staged                int64                     `json:"staged"`
	Expected              int64                     `json:"expected"`
	Released              int64                     `json:"released"`
	Superseded            int64                     `json:"superseded"`
	SupersededUndelivered int64                     `json:"superseded_undelivered"`
	Skipped               int64                     `json:"skipped"`
	Effects               map[backfill.Effect]int64 `json:"effects"`
	ResumeKey             backfill.Key              `json:"resume_key"`
	ProvenKey             backfill.Key              `json:"proven_key"`
	ProvenRows            int64                     `json:"proven_rows"`
	Percent               int                       `json:"percent"`
	Rate                  float64                   `json:"rate"` // rows per second
	ETA                   *time.Time                `json:"eta"`
	ETA90                 *time.Time                `json:"eta_p90"`
	Waiting               string                    `json:"waiting"`
	WaitingSince          *time.Time                `json:"waiting_since"`
	ThrottledSeconds      float64                   `json:"throttled_seconds"`
	Revision              int64                     `json:"revision"`
	RequestedBy           string                    `json:"requested_by"`
	RequestedAt           *time.Time                `json:"requested_at"`
	ReviewedBy            string                    `json:"reviewed_by"`
	ReviewedVia           string                    `json:"reviewed_via"`
	ReviewedAt            *time.Time                `json:"reviewed_at"`
	ClosedAt              *time.Time                `json:"closed_at"`
	RequestNote           string                    `json:"request_note"`
	ReviewNote            string                    `json:"review_note"`
	Reason                string                    `json:"reason"`
	WorkflowID            string                    `json:"workflow_id"`
	ConsoleURL            string                    `json:"console_url"`
	Alternative           *struct {
		Statement string  `json:"statement"`
		Rows      int64   `json:"rows"`
		Seconds   float64 `json:"seconds"`
	} `json:"alternative"`
	Links struct {
		Review string `json:"review"`
	} `json:"links"`

	raw json.RawMessage // as it came
}

type stagedRow struct {
	Key        backfill.Key    `json:"key"`
	Row        row             `json:"row"`
	Effect     backfill.Effect `json:"effect"`
	Receiver   row             `json:"receiver"`
	Result     row             `json:"result"` // what a mapping makes of the row
	Problem    string          `json:"problem"`
	Changed    []string        `json:"changed"`
	Superseded bool            `json:"superseded"`
	Overtaken  *struct {
		Seq       int64
		Op, State string
	} `json:"superseded_by"`
}

// row is a row in the order of its columns, which a map would lose.
type row []field

type field struct {
	column string
	value  *string // PostgreSQL's text, nil for NULL
}

func (r *row) UnmarshalJSON(raw []byte) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	start, err := dec.Token()
	if err != nil || start == nil {
		return err
	}
	if start != json.Delim('{') {
		return fmt.Errorf("a row that is no object: %.20s", raw)
	}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return err
		}
		f := field{column: name.(string)} // the decoder takes nothing else for a name
		if err := dec.Decode(&f.value); err != nil {
			return err
		}
		*r = append(*r, f)
	}
	return nil
}

// line is the row on one line.
func (r row) line() string {
	parts := make([]string, len(r))
	for i, f := range r {
		parts[i] = f.column + "=" + value(f.value)
	}
	return strings.Join(parts, ", ")
}

func (r row) get(column string) *string {
	for _, f := range r {
		if f.column == column {
			return f.value
		}
	}
	return nil
}

// value shows a value so that NULL, the empty text and the text NULL differ.
func value(v *string) string {
	switch {
	case v == nil:
		return "NULL"
	case *v == "", *v == "NULL", strings.Contains(*v, ", "), strings.TrimSpace(*v) != *v:
		return "'" + strings.ReplaceAll(*v, "'", "''") + "'"
	}
	return *v
}

type side struct {
	Name     string     `json:"name"`
	Agent    string     `json:"agent"`
	SeenAt   *time.Time `json:"seen_at"`
	Database string     `json:"database"`
	Problem  string     `json:"problem"`
}

type site struct {
	Epoch  int    `json:"epoch"`
	Name   string `json:"name"`
	Second bool   `json:"second_person"`
	Sides  []side `json:"sides"`
	Lag    []struct {
		From      string     `json:"from"`
		To        string     `json:"to"`
		Waiting   int64      `json:"waiting"`
		Outbox    int64      `json:"outbox"`
		OutboxAt  *time.Time `json:"outbox_at"`
		Oldest    *time.Time `json:"oldest"`
		AppliedAt *time.Time `json:"applied_at"`
	} `json:"lag"`
	Standstill []struct {
		Since   *time.Time `json:"since"`
		Message string     `json:"message"`
	} `json:"standstill"`
}

// tableConfig is how a table of a site is kept in sync.
type tableConfig struct {
	Table        string   `json:"table"`
	Active       bool     `json:"active"`
	Create       bool     `json:"create"`
	Update       bool     `json:"update"`
	Delete       bool     `json:"delete"`
	CapturedFrom []string `json:"captured_from"`
	Conflict     string   `json:"conflict"`
	ApplyOrder   int      `json:"apply_order"`
	Mapping      *struct {
		backfill.Mapping
		Version int `json:"version"`
	} `json:"mapping"`
}

// panel is a table in one of its directions.
type panel struct {
	tableConfig
	From         string     `json:"from"`
	To           string     `json:"to"`
	Key          []string   `json:"key"`
	SourceRows   *int64     `json:"source_rows"`
	ReceiverRows *int64     `json:"receiver_rows"`
	CountedAt    *time.Time `json:"counted_at"`
	Estimated    bool       `json:"estimated"`
	Capture      struct {
		OK      bool       `json:"ok"`
		Since   *time.Time `json:"since"`
		Problem string     `json:"problem"`
		Gap     string     `json:"gap"`
	} `json:"capture"`
	Stopped struct {
		Since  *time.Time `json:"since"`
		Reason string     `json:"reason"`
	} `json:"stopped"`
	Lag struct {
		Waiting int64      `json:"waiting"`
		Oldest  *time.Time `json:"oldest"`
	} `json:"lag"`
	Backfill struct {
		State      backfill.State       `json:"state"`
		ID         int64                `json:"id"`
		Staged     int64                `json:"staged"`
		Percent    int                  `json:"percent"`
		CanRequest bool                 `json:"can_request"`
		Conditions []backfill.Condition `json:"conditions"`
	} `json:"backfill"`
}

// change is an entry of the queue or of history.
type change struct {
	Seq       int64        `json:"seq"`
	Table     string       `json:"table"`
	From      string       `json:"from"`
	Op        string       `json:"op"`
	Key       backfill.Key `json:"key"`
	Request   int64        `json:"request"`
	CreatedAt *time.Time   `json:"created_at"`
	State     string       `json:"state"`
	Reason    string       `json:"reason"`
	AppliedAt *time.Time   `json:"applied_at"`
}

type auditEntry struct {
	At      *time.Time      `json:"at"`
	Account string          `json:"account"`
	Action  string          `json:"action"`
	Site    string          `json:"site"`
	Subject string          `json:"subject"`
	Via     string          `json:"via"`
	Address string          `json:"address"`
	Detail  json.RawMessage `json:"detail"`
}
