package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"backfill/api/client"
	"backfill/internal/backfill"
)

// Connection has the flags of every command that talks to the API.
type Connection struct {
	API   string `name:"api" env:"BACKFILL_API" placeholder:"URL" group:"api" help:"Where the API is. Default: what client.json in the state directory says, else http://127.0.0.1:8080."`
	Token string `name:"token" env:"BACKFILL_TOKEN" secret:"" placeholder:"TOKEN" group:"api" help:"What to sign in with. Default: the token in client.json, if that names the same API."`
	JSON  bool   `name:"json" group:"api" help:"Print the API's JSON as it came, for scripts; a page is one document."`
}

// Remote is a Connection and where to look when its flags are not given.
type Remote struct {
	Connection
	StateDir string `aliases:"state" env:"BACKFILL_STATE" placeholder:"DIR" group:"api" help:"The state directory of a backfill dev on this machine, which holds client.json."`
}

// ProvideSession is how kong makes the *session that a Run method asks for.
func (r *Remote) ProvideSession(s *Streams) (*session, error) { return r.open(s, r.StateDir) }

// FilteredRemote is a Remote where --state, which stands for --state-dir elsewhere, is
// a filter.
type FilteredRemote struct {
	Connection
	StateDir string `env:"BACKFILL_STATE" placeholder:"DIR" group:"api" help:"The state directory of a backfill dev on this machine, which holds client.json."`
}

// ProvideSession is how kong makes the *session that a Run method asks for.
func (r *FilteredRemote) ProvideSession(s *Streams) (*session, error) { return r.open(s, r.StateDir) }

// DefaultAPI is where the API listens unless told otherwise.
const DefaultAPI = "http://127.0.0.1:8080"

// DefaultState is the directory in which `backfill dev` keeps its state, and where
// commands look for the API that it runs.
func DefaultState() string {
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "backfill")
	}
	if os.Geteuid() == 0 {
		return "/var/lib/backfill"
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = "."
	}
	return filepath.Join(home, ".local", "state", "backfill")
}

// ClientFile is where a running `backfill dev` leaves its address and token, in
// its state directory.
const ClientFile = "client.json"

// ClientConfig is the content of ClientFile.
type ClientConfig struct {
	API   string `json:"api"`
	Token string `json:"token"`
}

func readClientFile(path string) (c ClientConfig, err error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil {
		return c, fmt.Errorf("read the API's address and token: %w: give --api and --token, or another --state-dir", withPath(path, err))
	}
	return c, nil
}

func withPath(path string, err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return err // names it already
	}
	return fmt.Errorf("%s: %w", path, err)
}

// session is what one command needs to talk to the API and to people.
type session struct {
	*Streams
	c    *client.Client
	out  printer // the answer, on standard output
	note printer // remarks, on standard error, so that the answer stays alone
	json bool
}

func (c *Connection) open(s *Streams, dir string) (*session, error) {
	api, token := c.API, c.Token
	if dir == "" {
		dir = DefaultState()
	}
	path := filepath.Join(dir, ClientFile)
	if api == "" || token == "" {
		found, err := readClientFile(path)
		if err != nil {
			return nil, err
		}
		if api == "" {
			api = found.API
		}
		// A token goes to no other API than its own.
		if token == "" && strings.TrimRight(api, "/") == strings.TrimRight(found.API, "/") {
			token = found.Token
		}
	}
	if api == "" {
		api = DefaultAPI
	}
	if token == "" {
		return nil, usagef("no token for %s: give one with --token or BACKFILL_TOKEN (backfill token create makes one), or name the state directory of a running backfill dev with --state-dir (looked into %s)", api, path)
	}
	remote, err := client.New(api, token)
	if err != nil {
		return nil, usagef("%v", err)
	}
	return &session{Streams: s, c: remote, out: printer{s.Out}, note: printer{s.Err}, json: c.JSON}, nil
}

// answer prints what the API answered: as it came for scripts, else by show.
func answer[T any](s *session, a client.Answer[T], show func(*T)) error {
	if s.json {
		_, err := fmt.Fprintf(s.Out, "%s\n", a.Raw)
		return err
	}
	show(&a.Value)
	return nil
}

// given is what a flag was set to, nil when it was left out.
func given[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
}

// plain is what a field of an answer holds, the zero value for null.
func plain[T any](v *T) T {
	if v == nil {
		return *new(T)
	}
	return *v
}

// Paging bounds what a list prints.
type Paging struct {
	Limit int  `default:"50" placeholder:"N" help:"Print no more than this (${default})."`
	All   bool `help:"Print everything, however long."`
}

// list prints a list page by page; show puts one entry into the table.
func list[T any](s *session, p Paging, t *table, show func(*T), read func(*client.Cursor, *client.Limit) (client.Answer[client.Page[T]], error)) (last client.Page[T], err error) {
	if p.Limit < 1 {
		return last, usagef("--limit must be at least 1")
	}
	limit := p.Limit
	if p.All {
		limit = 0
	}
	some := false
	for a, err := range client.Pages(limit, read) {
		if err != nil {
			return last, err
		}
		last = a.Value
		if s.json {
			if _, err := fmt.Fprintf(s.Out, "%s\n", a.Raw); err != nil {
				return last, err
			}
			continue
		}
		for i := range last.Data {
			some = true
			show(&last.Data[i])
		}
		t.flush()
	}
	switch {
	case s.json:
	case !some:
		s.note.printf("none\n")
	case last.NextCursor != nil:
		s.note.printf("there are more: --limit N or --all\n")
	}
	return last, nil
}

// site is the one that was given, or the only one there is.
func (s *session) site(ctx context.Context, given string) (string, error) {
	if given != "" {
		return given, nil
	}
	all, err := s.c.ListSites(ctx)
	if err != nil {
		return "", err
	}
	var names []string
	for _, x := range all.Value.Data {
		names = append(names, x.Name)
	}
	return s.only("site", "--site", "there is no site yet: backfill site add makes one", names)
}

// tableAndSide are the ones that were given, or the only ones of a site.
func (s *session) tableAndSide(ctx context.Context, site, table, from string) (string, string, error) {
	if table != "" && from != "" {
		return table, from, nil
	}
	all, err := s.c.ListTables(ctx, site)
	if err != nil {
		return "", "", err
	}
	if table != "" {
		name, err := backfill.ParseTableName(table)
		if err != nil {
			return "", "", err
		}
		table = name.String()
	}
	var tables, sides []string
	for _, p := range all.Value.Data {
		if from == "" || p.From == from {
			tables = append(tables, p.Table)
		}
	}
	if table == "" {
		if table, err = s.only("table", "--table", "no table of site "+site+" is captured this way: backfill table set configures one", tables); err != nil {
			return "", "", err
		}
	}
	if from != "" {
		return table, from, nil
	}
	for _, p := range all.Value.Data {
		if p.Table == table {
			sides = append(sides, p.From)
		}
	}
	from, err = s.only("side", "--from", "table "+table+" of site "+site+" is captured from no side: backfill table list shows the tables there are", sides)
	return table, from, err
}

// only takes the one choice there is, and says so.
func (s *session) only(what, flag, none string, choices []string) (string, error) {
	slices.Sort(choices)
	switch choices = slices.Compact(choices); len(choices) {
	case 0:
		return "", usagef("%s", none)
	case 1:
		s.note.printf("%s %s (the only one)\n", what, choices[0])
		return choices[0], nil
	}
	const some = 8
	shown := strings.Join(choices[:min(len(choices), some)], ", ")
	if len(choices) > some {
		shown += ", …"
	}
	return "", usagef("which %s? give %s, one of: %s", what, flag, shown)
}
