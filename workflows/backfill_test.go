package workflows

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/mock"
	"github.com/stretchr/testify/require"
	"github.com/stretchr/testify/suite"
	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/testsuite"

	"backfill/activities"
	"backfill/internal/backfill"
	"backfill/internal/control"
)

// The branches and timing of the workflow. What its activities really do is tested
// with real databases elsewhere; here a small stand-in for the request's row plays
// the control database.
type backfillSuite struct {
	suite.Suite
	testsuite.WorkflowTestSuite
	env    *testsuite.TestWorkflowEnvironment
	db     activities.Snapshot
	mu     sync.Mutex // of db, where activities may run beside each other
	in     BackfillInput
	origin control.Origin // of the last decision, for the audit
	via    string         // by what way the last decision came
	judged int            // how often the staged rows were judged
}

func TestBackfillWorkflow(t *testing.T) { suite.Run(t, new(backfillSuite)) }

func (s *backfillSuite) SetupTest() {
	s.env = s.NewTestWorkflowEnvironment()
	s.env.SetTestTimeout(20 * time.Second)
	s.in = BackfillInput{RequestID: 7, Site: "maple", Table: "public.students", From: "school", To: "central"}
	s.db = activities.Snapshot{State: backfill.Pending}
	a, c := &activities.Agent{}, &activities.Control{}
	for name, act := range map[string]any{"Walk": a.Walk, "Classify": a.Classify, "Look": c.Look, "Decide": c.Decide, "Pause": c.Pause, "Close": c.Close, "Release": c.Release, "Rejudge": c.Rejudge} {
		s.env.RegisterActivityWithOptions(act, activity.RegisterOptions{Name: name})
	}
	s.env.OnActivity("Look", mock.Anything, int64(7)).Return(func(context.Context, int64) (activities.Snapshot, error) { return s.db, nil }).Maybe()
	s.judged = 0
	s.env.OnActivity("Classify", mock.Anything, int64(7)).Return(func(context.Context, int64) error {
		s.judged++
		return nil
	}).Maybe()
	s.env.OnActivity("Decide", mock.Anything, mock.Anything).Return(func(_ context.Context, v activities.Verdict) (activities.Snapshot, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.db.State != backfill.AwaitingReview || v.Decision.Revision != s.db.Revision {
			return activities.Snapshot{}, temporal.NewNonRetryableApplicationError("not now", ErrConflict, nil)
		}
		s.db.State, s.db.ReviewedBy, s.via, s.origin = backfill.Rejected, v.Decision.By, v.Decision.Via, v.Origin
		if v.Approve {
			s.db.State = backfill.Releasing
		}
		return s.db, nil
	}).Maybe()
	s.env.OnActivity("Close", mock.Anything, mock.Anything).Return(func(_ context.Context, v activities.Closing) (activities.Snapshot, error) {
		if !s.db.State.Open() {
			return activities.Snapshot{}, temporal.NewNonRetryableApplicationError("closed already", ErrConflict, nil)
		}
		s.db.State, s.db.Reason = v.To, v.Reason
		return s.db, nil
	}).Maybe()
	s.env.OnActivity("Pause", mock.Anything, mock.Anything).Return(func(_ context.Context, h activities.Hold) (activities.Snapshot, error) {
		s.db.Paused = h.Paused
		return s.db, nil
	}).Maybe()
	s.env.OnActivity("Release", mock.Anything, int64(7)).Return(func(context.Context, int64) (activities.Snapshot, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.db.State, s.db.Released = backfill.Finished, s.db.Staged
		return s.db, nil
	}).Maybe()
}

// walks lets the walk end at once with rows staged.
func (s *backfillSuite) walks(rows int64) {
	s.env.OnActivity("Walk", mock.Anything, int64(7)).Return(func(context.Context, int64) (activities.WalkResult, error) {
		s.db.State, s.db.Staged, s.db.Revision = backfill.AwaitingReview, rows, 1
		return activities.WalkResult{Snapshot: s.db}, nil
	})
}

func (s *backfillSuite) run() BackfillStatus {
	s.env.ExecuteWorkflow(Backfill, s.in)
	s.Require().True(s.env.IsWorkflowCompleted())
	s.Require().NoError(s.env.GetWorkflowError())
	var status BackfillStatus
	s.Require().NoError(s.env.GetWorkflowResult(&status))
	return status
}

func (s *backfillSuite) after(d time.Duration, do func()) { s.env.RegisterDelayedCallback(do, d) }

// answer is how an update ended.
type answer struct {
	accepted bool
	status   BackfillStatus
	err      error
}

func (s *backfillSuite) update(name string, payload any) *answer {
	a := &answer{}
	s.env.UpdateWorkflow(name, name+time.Now().String(), &testsuite.TestUpdateCallback{
		OnAccept: func() { a.accepted = true },
		OnReject: func(err error) { a.err = err },
		OnComplete: func(v any, err error) {
			a.err = err
			if status, ok := v.(BackfillStatus); ok {
				a.status = status
			}
		},
	}, payload)
	return a
}

func (s *backfillSuite) TestApprovedByUpdate() {
	s.walks(10)
	var got *answer
	s.after(time.Hour, func() { got = s.update(Approve, Decision{By: "ana", Revision: 1}) })
	s.Equal(backfill.Finished, s.run().State)
	s.NoError(got.err)
	s.Equal("ana", got.status.ReviewedBy)
}

func (s *backfillSuite) TestRejectedBySignal() {
	s.walks(10)
	s.after(time.Hour, func() { s.env.SignalWorkflow(Reject, Decision{By: "ana", Revision: 1, Note: "no"}) })
	status := s.run()
	s.Equal(backfill.Rejected, status.State)
	s.Zero(status.Released)
}

func (s *backfillSuite) TestDecisionForAnotherRevisionIsRefusedBeforeHistory() {
	s.walks(10)
	var wrong *answer
	s.after(time.Hour, func() { wrong = s.update(Approve, Decision{By: "ana", Revision: 2}) })
	s.after(2*time.Hour, func() { s.update(Approve, Decision{By: "ana", Revision: 1}) })
	s.Equal(backfill.Finished, s.run().State)
	s.False(wrong.accepted)
	s.ErrorContains(wrong.err, "revision 1")
}

func (s *backfillSuite) TestSignalForAnotherRevisionIsIgnored() {
	s.walks(10)
	s.after(time.Hour, func() { s.env.SignalWorkflow(Approve, Decision{By: "ana", Revision: 9}) })
	s.after(2*time.Hour, func() {
		s.Equal(backfill.AwaitingReview, s.db.State)
		s.env.SignalWorkflow(Approve, Decision{By: "bo", Revision: 1})
	})
	s.Equal("bo", s.run().ReviewedBy)
}

func (s *backfillSuite) TestSignalWithoutANameIsIgnored() {
	s.walks(10)
	s.after(time.Hour, func() { s.env.SignalWorkflow(Approve, Decision{Revision: 1}) })
	s.after(2*time.Hour, func() { s.env.SignalWorkflow(Reject, Decision{By: "bo", Revision: 1, Note: "no"}) })
	s.Equal(backfill.Rejected, s.run().State)
}

// Names that stand in examples are nobody's; a name from a signal is marked as such.
func (s *backfillSuite) TestSignalsUnderAPlaceholderAreIgnoredAndOthersMarked() {
	s.walks(10)
	s.after(time.Hour, func() { s.env.SignalWorkflow(Approve, Decision{By: "your name", Revision: 1}) })
	s.after(2*time.Hour, func() {
		s.Equal(backfill.AwaitingReview, s.db.State)
		s.env.SignalWorkflow(Reject, Decision{By: "bo", Revision: 1, Note: "no", Origin: control.Origin{Via: control.ViaSession, Address: "192.0.2.1"}})
	})
	s.Equal(backfill.Rejected, s.run().State)
	s.Equal(backfill.ViaTemporal, s.via)
	s.Equal(control.Origin{Via: backfill.ViaTemporal}, s.origin, "what a signal says of that is not believed")
}

func (s *backfillSuite) TestAnUpdateTellsTheAuditFromWhere() {
	from := control.Origin{Via: control.ViaSession, Address: "192.0.2.1"}
	s.walks(10)
	s.after(time.Hour, func() { s.update(Reject, Decision{By: "ana", Revision: 1, Note: "no", Origin: from}) })
	s.Equal(backfill.Rejected, s.run().State)
	s.Equal(from, s.origin)
}

func (s *backfillSuite) TestJudgingAgainRunsTheReceiverOnceMore() {
	s.walks(10)
	s.env.OnActivity("Rejudge", mock.Anything, activities.Judgement{RequestID: 7, Revision: 1, By: "ana"}).Return(
		func(context.Context, activities.Judgement) (activities.Snapshot, error) {
			s.db.Revision = 2
			return s.db, nil
		}).Once()
	s.after(time.Hour, func() {
		s.Equal(1, s.judged)
		s.update(Judge, By{By: "ana"})
	})
	s.after(2*time.Hour, func() {
		s.Equal(2, s.judged)
		s.update(Approve, Decision{By: "ana", Revision: 1})
		s.update(Approve, Decision{By: "ana", Revision: 2})
	})
	s.EqualValues(2, s.run().Revision)
}

// An approval that arrives before the rows are there does not count.
func (s *backfillSuite) TestApprovalWhileWalkingIsRefused() {
	s.env.OnActivity("Walk", mock.Anything, int64(7)).Return(func(context.Context, int64) (activities.WalkResult, error) {
		s.db.State, s.db.Staged, s.db.Revision = backfill.AwaitingReview, 3, 1
		return activities.WalkResult{Snapshot: s.db}, nil
	}).After(time.Hour)
	var early *answer
	s.after(time.Minute, func() { early = s.update(Approve, Decision{By: "ana", Revision: 1}) })
	s.after(2*time.Hour, func() { s.update(Reject, Decision{By: "ana", Revision: 1, Note: "no"}) })
	s.Equal(backfill.Rejected, s.run().State)
	s.Error(early.err)
}

// Two people decide at once: one of them wins, whoever it is, and the other is told.
func (s *backfillSuite) TestSecondDecisionIsAConflict() {
	s.walks(10)
	var approve, reject *answer
	s.after(time.Hour, func() {
		approve = s.update(Approve, Decision{By: "ana", Revision: 1})
		reject = s.update(Reject, Decision{By: "bo", Revision: 1, Note: "no"})
	})
	state, loser := s.run().State, reject
	if state == backfill.Rejected {
		loser = approve
	} else {
		s.Equal(backfill.Finished, state)
	}
	s.True((approve.err == nil) != (reject.err == nil), "approve: %v, reject: %v", approve.err, reject.err)
	var app *temporal.ApplicationError
	s.Require().True(errors.As(loser.err, &app), "%v", loser.err)
	s.Equal(ErrConflict, app.Type())
}

func (s *backfillSuite) TestCancelDuringAWalkWithoutAnAgent() {
	s.env.OnActivity("Walk", mock.Anything, int64(7)).Return(activities.WalkResult{}, nil).After(1000 * time.Hour).Maybe()
	s.after(time.Hour, func() { s.update(Cancel, By{By: "ana", Note: "wrong table"}) })
	status := s.run()
	s.Equal(backfill.Cancelled, status.State)
	s.Contains(status.Reason, "ana")
}

func (s *backfillSuite) TestCancelInTheConsole() {
	s.walks(10)
	s.after(time.Hour, s.env.CancelWorkflow)
	s.Equal(backfill.Cancelled, s.run().State)
}

func (s *backfillSuite) TestPausedWalkGoesOnAfterResume() {
	calls := 0
	s.env.OnActivity("Walk", mock.Anything, int64(7)).Return(func(context.Context, int64) (activities.WalkResult, error) {
		calls++
		if s.db.State = backfill.InProgress; calls == 1 {
			s.db.Paused = true
			return activities.WalkResult{Snapshot: s.db}, nil
		}
		s.db.State, s.db.Revision = backfill.AwaitingReview, 1
		return activities.WalkResult{Snapshot: s.db}, nil
	})
	s.after(time.Hour, func() { s.Equal(1, calls); s.update(Resume, By{By: "ana"}) })
	s.after(2*time.Hour, func() { s.update(Reject, Decision{By: "ana", Revision: 1, Note: "no"}) })
	s.Equal(backfill.Rejected, s.run().State)
	s.Equal(2, calls)
}

// What a walk found before a resume may arrive after it.
func (s *backfillSuite) TestWhatIsFoundBesideADecisionIsLookedAtAgain() {
	calls := 0
	s.env.OnActivity("Walk", mock.Anything, int64(7)).Return(func(context.Context, int64) (activities.WalkResult, error) {
		if calls++; calls == 1 {
			return activities.WalkResult{Snapshot: activities.Snapshot{State: backfill.InProgress, Paused: true}}, nil
		}
		s.db.State, s.db.Revision = backfill.AwaitingReview, 1
		return activities.WalkResult{Snapshot: s.db}, nil
	}).After(time.Hour)
	s.after(time.Minute, func() { s.update(Resume, By{By: "ana"}) })
	s.after(5*time.Hour, func() { s.update(Reject, Decision{By: "ana", Revision: 1, Note: "no"}) })
	s.Equal(backfill.Rejected, s.run().State)
	s.Equal(2, calls)
}

func (s *backfillSuite) TestPermanentErrorFailsTheRequest() {
	s.env.OnActivity("Walk", mock.Anything, int64(7)).
		Return(activities.WalkResult{}, temporal.NewNonRetryableApplicationError(`relation "students" does not exist`, activities.ErrPermanent, nil))
	status := s.run()
	s.Equal(backfill.Failed, status.State)
	s.Contains(status.Reason, "does not exist")
}

func (s *backfillSuite) TestOtherErrorsAreRetried() {
	calls := 0
	s.env.OnActivity("Walk", mock.Anything, int64(7)).Return(func(context.Context, int64) (activities.WalkResult, error) {
		if calls++; calls < 4 {
			return activities.WalkResult{}, errors.New("connection refused")
		}
		s.db.State, s.db.Revision = backfill.AwaitingReview, 1
		return activities.WalkResult{Snapshot: s.db}, nil
	})
	s.after(time.Hour, func() { s.update(Reject, Decision{By: "ana", Revision: 1, Note: "no"}) })
	s.Equal(backfill.Rejected, s.run().State)
	s.Equal(4, calls)
}

// A run that was lost is started again wherever its request stands.
func (s *backfillSuite) TestBeginsAtAnyState() {
	s.db = activities.Snapshot{State: backfill.Releasing, Staged: 5}
	status := s.run()
	s.Equal(backfill.Finished, status.State)
	s.EqualValues(5, status.Released)
}

func (s *backfillSuite) TestRefreshEndsARunWhoseRequestWasClosedElsewhere() {
	s.walks(10)
	s.after(time.Hour, func() {
		s.db.State, s.db.Reason = backfill.Failed, "a partition was truncated"
		s.env.SignalWorkflow(Refresh, struct{}{})
	})
	s.Equal(backfill.Failed, s.run().State)
}

func (s *backfillSuite) TestStatusQuery() {
	s.walks(10)
	s.after(time.Hour, func() {
		v, err := s.env.QueryWorkflow(Status)
		s.Require().NoError(err)
		var status BackfillStatus
		s.Require().NoError(v.Get(&status))
		s.Equal(backfill.AwaitingReview, status.State)
		s.EqualValues(10, status.Staged)
		s.update(Reject, Decision{By: "ana", Revision: 1, Note: "no"})
	})
	s.run()
}

// The payload shown on the request page and in the console's details is what a
// script sends: field names are part of the contract.
func TestDecisionPayload(t *testing.T) {
	p, err := converter.GetDefaultDataConverter().ToPayload(Decision{By: "ana", Revision: 3, Note: "fine"})
	require.NoError(t, err)
	require.JSONEq(t, `{"by":"ana","revision":3,"note":"fine"}`, string(p.Data))
}

func TestWorkflowIDs(t *testing.T) {
	r := backfill.Request{Table: "public.students", Direction: backfill.Direction{Site: "maple", From: "school"}}
	require.Equal(t, "backfill/maple/public.students/school", r.WorkflowID())
	r.Key = backfill.Key{"7"}
	require.Equal(t, "backfill/maple/public.students/school/"+r.Key.Hash(), r.WorkflowID())
	require.NotEqual(t, backfill.Key{"a", "b"}.Hash(), backfill.Key{"ab"}.Hash())
	require.NotEqual(t, backfill.Key{"1", "2"}.Hash(), backfill.Key{"12", ""}.Hash())
}
