// Package connect says in one line why a database cannot be reached, and what to
// check.
package connect

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
)

// Failure is a connection that could not be made.
type Failure struct {
	message string
	cause   error
}

func (f *Failure) Error() string { return f.message }
func (f *Failure) Unwrap() error { return f.cause }

// Explain turns the error of a connection to a database, named by what, into one
// line that says where it was to lead, as whom, why it failed, and what to check. It
// holds no password. Any other error is returned as it is.
func Explain(what string, err error) error {
	var failed *pgconn.ConnectError
	var parse *pgconn.ParseConfigError
	var known *Failure
	switch {
	case errors.As(err, &known):
		return err
	case errors.As(err, &parse):
		// The driver's message may quote the connection string.
		return &Failure{what + ": the connection string cannot be understood: write it like postgres://user@host:5432/database", nil}
	case !errors.As(err, &failed):
		return err
	}
	c := failed.Config
	why, check := reason(err)
	return &Failure{fmt.Sprintf("cannot connect to %s at %s/%s as %s: %s: %s", what, hosts(c), c.Database, c.User, why, check), err}
}

// hosts lists where a connection was tried.
func hosts(c *pgconn.Config) string {
	all := []string{Address(c.Host, c.Port)}
	for _, f := range c.Fallbacks {
		if at := Address(f.Host, f.Port); !slices.Contains(all, at) {
			all = append(all, at)
		}
	}
	return strings.Join(all, ",")
}

// Address is where a server listens: host:port, or the directory of its socket.
func Address(host string, port uint16) string {
	if strings.HasPrefix(host, "/") {
		return fmt.Sprintf("%s:%d", host, port)
	}
	return net.JoinHostPort(host, fmt.Sprint(port))
}

func reason(err error) (why, check string) {
	var refused *pgconn.PgError
	var name *net.DNSError
	var network net.Error
	switch {
	case errors.As(err, &refused):
		return refused.Message, advice(refused.Code)
	case errors.As(err, &name):
		return "no host " + name.Name, "check the host's name"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused", "check host and port, and that the server runs and listens there"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network) && network.Timeout():
		return "no answer in time", "check host and port, and what firewalls let through"
	case errors.Is(err, syscall.ENOENT):
		return "no such socket", "check the directory and the port, and that the server runs"
	}
	why = innermost(err).Error()
	if strings.Contains(strings.ToLower(why), "tls") {
		return why, "check sslmode and the certificates"
	}
	return why, "check the connection string"
}

// advice is what to check by PostgreSQL's code.
func advice(code string) string {
	switch code {
	case "28P01":
		return "check user and password"
	case "28000":
		return "check the user, and what the server's pg_hba.conf lets in"
	case "3D000":
		return "check the database's name"
	case "42501":
		return "grant the role CONNECT on the database"
	case "53300":
		return "raise the server's max_connections, or end sessions"
	case "57P03":
		return "try again in a moment"
	}
	return "check the connection string"
}

func innermost(err error) error {
	for {
		switch e := err.(type) {
		case interface{ Unwrap() error }:
			if e.Unwrap() == nil {
				return err
			}
			err = e.Unwrap()
		case interface{ Unwrap() []error }:
			if len(e.Unwrap()) == 0 {
				return err
			}
			err = e.Unwrap()[0]
		default:
			return err
		}
	}
}
