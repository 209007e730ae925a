package api

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"backfill/internal/backfill"
	"backfill/internal/control"
)

func backfillPath(id int64) string { return prefix + "/backfills/" + strconv.FormatInt(id, 10) }

type backfillJSON struct {
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
	Identical             int64                     `json:"identical"`
	Effects               map[backfill.Effect]int64 `json:"effects"`
	Skipped               int64                     `json:"skipped"`
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
	RequestedAt           time.Time                 `json:"requested_at"`
	StartedAt             *time.Time                `json:"started_at"`
	WalkedAt              *time.Time                `json:"walked_at"`
	ReviewedBy            *string                   `json:"reviewed_by"`
	ReviewedVia           *string                   `json:"reviewed_via"` // "temporal" for a signal
	ReviewedAt            *time.Time                `json:"reviewed_at"`
	ClosedAt              *time.Time                `json:"closed_at"`
	Note                  string                    `json:"note"` // the reviewer's once it is decided, the requester's before
	RequestNote           string                    `json:"request_note"`
	ReviewNote            string                    `json:"review_note"`
	Reason                string                    `json:"reason"`
	WorkflowID            string                    `json:"workflow_id"`
	ConsoleURL            *string                   `json:"console_url"`
	Alternative           *Alternative              `json:"alternative,omitempty"` // where one statement would do, and just in answers about one request
	Links                 map[string]string         `json:"links"`
}

func (s *Server) showBackfill(r *backfill.Request) backfillJSON {
	now := time.Now()
	out := backfillJSON{
		ID: r.ID, Site: r.Site, Table: r.Table, From: r.From, To: r.To, Mode: r.Mode, Key: r.Key, State: r.State, Paused: r.Paused,
		Staged: r.Staged, Expected: r.Expected, Released: r.Released,
		Superseded: r.Superseded, SupersededUndelivered: r.SupersededUndelivered, Identical: r.Effects[backfill.Identical],
		Effects: r.Effects, Skipped: r.Skipped, ResumeKey: r.ResumeKey, ProvenKey: r.ProvenKey, ProvenRows: r.ProvenRows, Percent: r.Percent(), Rate: r.Rate(now), ETA: r.ETA(now), ETA90: r.ETA90(now),
		Waiting: r.Waiting, WaitingSince: r.WaitingSince, ThrottledSeconds: r.Throttled.Seconds(), Revision: r.Revision, RequestedBy: r.RequestedBy, RequestedAt: r.RequestedAt,
		StartedAt: r.StartedAt, WalkedAt: r.WalkedAt, ReviewedBy: orNull(r.ReviewedBy), ReviewedVia: orNull(r.ReviewedVia), ReviewedAt: r.ReviewedAt, ClosedAt: r.ClosedAt,
		Note: r.Note, RequestNote: r.Note, ReviewNote: r.ReviewNote, Reason: r.Reason,
		WorkflowID: r.WorkflowID(), ConsoleURL: orNull(s.service.Console(r)), Links: s.links(r),
	}
	if r.ReviewedBy != "" {
		out.Note = r.ReviewNote
	}
	return out
}

// showOne is showBackfill with what is told of one request alone.
func (s *Server) showOne(c echo.Context, r *backfill.Request) (out backfillJSON, err error) {
	out = s.showBackfill(r)
	out.Alternative, err = s.service.Alternative(c.Request().Context(), r)
	return out, err
}

// links are the addresses that belong to a request, of the decisions only those
// that its state allows.
func (s *Server) links(r *backfill.Request) map[string]string {
	self := backfillPath(r.ID)
	out := map[string]string{"self": self, "rows": self + "/rows", "progress": self + "/progress", "events": self + "/events"}
	if review := s.service.ReviewURL(r.ID); review != "" {
		out["review"] = review
	}
	for name, err := range map[string]error{
		"approve": r.Decidable(r.Revision), "reject": r.Decidable(r.Revision), "judge": r.Judgeable(),
		"pause": r.Pausable(true), "resume": r.Pausable(false), "cancel": r.Cancellable(),
	} {
		if err == nil {
			out[name] = self + "/" + name
		}
	}
	return out
}

func (s *Server) requestBackfill(c echo.Context) error {
	var in struct {
		Table string          `json:"table"`
		From  string          `json:"from"`
		Key   json.RawMessage `json:"key"` // raw, so that numbers keep their spelling
		Mode  string          `json:"mode"`
		Note  string          `json:"note"`
	}
	if err := decode(c, &in); err != nil {
		return err
	}
	r, err := s.service.RequestBackfill(c.Request().Context(), accountOf(c),
		RequestInput{Site: c.Param("site"), Table: in.Table, From: in.From, Key: in.Key, Mode: in.Mode, Note: in.Note})
	if err != nil {
		return err
	}
	c.Response().Header().Set(echo.HeaderLocation, backfillPath(r.ID))
	out, err := s.showOne(c, r)
	if err != nil {
		return err
	}
	return c.JSON(http.StatusCreated, out)
}

func (s *Server) listBackfills(c echo.Context) error {
	before, err := positionOf(c)
	if err != nil {
		return err
	}
	site, only, err := siteFilter(c)
	if err != nil {
		return err
	}
	all, err := s.service.Backfills(c.Request().Context(), control.RequestFilter{
		Site: site, Sites: only, Table: c.QueryParam("table"), From: c.QueryParam("from"),
		States: c.QueryParams()["state"], Before: before, Limit: limitOf(c) + 1,
	})
	if err != nil {
		return err
	}
	return listPage(c, all, func(r *backfill.Request) int64 { return r.ID }, s.showBackfill)
}

func (s *Server) getBackfill(c echo.Context) error {
	id, err := idOf(c, "id")
	if err != nil {
		return err
	}
	return s.answer(c)(s.service.Backfill(c.Request().Context(), id))
}

// answer shows a request, or fails.
func (s *Server) answer(c echo.Context) func(*backfill.Request, error) error {
	return func(r *backfill.Request, err error) error {
		if err != nil {
			return err
		}
		out, err := s.showOne(c, r)
		if err != nil {
			return err
		}
		return c.JSON(http.StatusOK, out)
	}
}

// decide handles approve and reject.
func (s *Server) decide(do func(context.Context, Account, int64, Decision) (*backfill.Request, error)) echo.HandlerFunc {
	return func(c echo.Context) error {
		var in struct {
			Revision      int64  `json:"revision"`
			Note          string `json:"note"`
			SkipIdentical bool   `json:"skip_identical"`
		}
		id, err := idOf(c, "id")
		if err != nil {
			return err
		}
		if err := decode(c, &in); err != nil {
			return err
		}
		return s.answer(c)(do(c.Request().Context(), accountOf(c), id, Decision(in)))
	}
}

// hold handles pause, resume and cancel.
func (s *Server) hold(do func(context.Context, Account, int64, string) (*backfill.Request, error)) echo.HandlerFunc {
	return s.decide(func(ctx context.Context, a Account, id int64, d Decision) (*backfill.Request, error) {
		return do(ctx, a, id, d.Note)
	})
}

func (s *Server) judge(c echo.Context) error {
	id, err := idOf(c, "id")
	if err != nil {
		return err
	}
	return s.answer(c)(s.service.Judge(c.Request().Context(), accountOf(c), id))
}
