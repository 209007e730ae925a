package connect

import (
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// Lost is after how long without a sign of life a connection counts as dead. The
// other end's host may have lost its power or its network, in which case nobody says so:
// a client would wait for an answer, and a server keep the locks of the transaction, for
// up to two hours by default. It is also how long the other end may refuse to take more
// of what it is sent.
const Lost = 30 * time.Second

// alive are how both ends ask: a quiet connection is probed after 10 s, every 5 s.
var alive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}

// server are the settings with which a server does the same; over a socket file they do
// nothing.
var server = map[string]string{
	"tcp_keepalives_idle":     seconds(alive.Idle),
	"tcp_keepalives_interval": seconds(alive.Interval),
	"tcp_keepalives_count":    strconv.Itoa(alive.Count),
	"tcp_user_timeout":        strconv.FormatInt(Lost.Milliseconds(), 10),
}

func seconds(d time.Duration) string { return strconv.Itoa(int(d.Seconds())) }

// Watch has connections made by c notice within Lost that the server is lost.
func Watch(c *pgx.ConnConfig) {
	d := &net.Dialer{KeepAliveConfig: alive, Control: func(network, _ string, raw syscall.RawConn) (err error) {
		if network != "tcp4" && network != "tcp6" {
			return nil
		}
		if failed := raw.Control(func(fd uintptr) { err = setUserTimeout(fd, Lost) }); failed != nil {
			return failed
		}
		return err
	}}
	c.DialFunc = d.DialContext
}

// BeWatched also has the server notice that this end is lost. Not for connections that
// pass a pooler: it would refuse the settings.
func BeWatched(c *pgx.ConnConfig) {
	Watch(c)
	for name, value := range server {
		c.RuntimeParams[name] = value
	}
}

// Statement has the server of the session notice that this end is lost.
func Statement() string {
	sql := ""
	for name, value := range server {
		sql += "SET " + name + " = " + value + ";"
	}
	return sql
}
