package backfill

import (
	"errors"
	"fmt"
)

// Code classifies an Error; the API turns it into a status, the command line
// into an exit code.
type Code string

// The codes callers decide by.
const (
	NotFound     Code = "not_found"    // no such site, side, table or request
	Invalid      Code = "invalid"      // the input cannot be understood
	Refused      Code = "refused"      // understood, but a condition does not hold
	Conflict     Code = "conflict"     // wrong state, wrong revision, or already open
	Unauthorized Code = "unauthorized" // no valid token
	Forbidden    Code = "forbidden"    // the role is too small
	TooMany      Code = "too_many"     // tried too often
	Unavailable  Code = "unavailable"  // a part that is needed is away
)

// Error is a failure a person can act on. Its message may be shown to anyone who
// may see the request; the cause is for logs only.
type Error struct {
	Code    Code
	Message string
	Fields  []FieldError // the parts of the input, or the conditions, that failed
	Open    int64        // for Conflict: the open request in the way, 0 when there is none
	Cause   error
}

// FieldError names one failed field or condition.
type FieldError struct {
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

func (e *Error) Error() string {
	if e.Cause != nil {
		return e.Message + ": " + e.Cause.Error()
	}
	return e.Message
}

func (e *Error) Unwrap() error { return e.Cause }

// Errorf makes an Error of a code.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// NewEpoch says how a site goes on after one of its databases was restored or
// failed over.
func NewEpoch(site string) string {
	return "once the databases are the ones to go on with, open a new epoch: backfill site new-epoch " + site + " --note WHY"
}

// CodeOf returns the code of the first Error in err's chain, or "".
func CodeOf(err error) Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
