// Command backfill fills in the rows that a pair of synced PostgreSQL databases
// never exchanged. This file is its command line: flags and wiring, no logic.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"os/user"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	_ "golang.org/x/crypto/x509roots/fallback" // for images and machines without certificates of their own

	"backfill/activities"
	"backfill/api"
	"backfill/internal/cli"
	"backfill/internal/control"
	"backfill/internal/dev"
	"backfill/internal/serve"
	"backfill/internal/side"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal asks to stop; once it came, a second one ends the process.
	context.AfterFunc(ctx, stop)
	os.Exit(cli.Run(ctx, os.Args[1:], os.Stdout, os.Stderr, &grammar{}, options()...))
}

const about = `Backfill re-sends the rows of a PostgreSQL table that its sync triggers never saw. A backfill walks the table on one
side, stages every row for a person to read, and sends nothing to the other side until that person approves.

Try it with: backfill dev`

func options() []kong.Option {
	return []kong.Option{
		kong.Description(about),
		cli.EveryFlagIsASetting("api", "worker"),
		kong.Vars{"state": cli.DefaultState(), "version": "backfill " + version()},
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true, WrapUpperBound: 120}),
		kong.ExplicitGroups([]kong.Group{
			{Key: "run", Title: "Run it:"},
			{Key: "setup", Title: "Set it up:"},
			{Key: "backfills", Title: "Request, review and release backfills:"},
			{Key: "proof", Title: "Prove that both sides hold the same:"},
			{Key: "look", Title: "See what is sent and who did what:"},
			{Key: "commands", Title: "Commands:"}, // of a command
			{Key: "api", Title: "To reach the API:"},
		}),
	}
}

// version is the module's, or else the commit it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "of an unknown build"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	built := map[string]string{}
	for _, s := range info.Settings {
		built[s.Key] = s.Value
	}
	revision := built["vcs.revision"]
	if revision == "" {
		return "built by " + info.GoVersion + " outside of a checkout"
	}
	text := revision[:min(len(revision), 12)] + " of " + built["vcs.time"]
	if built["vcs.modified"] == "true" {
		text += ", modified"
	}
	return text
}

// grammar is the whole command line.
type grammar struct {
	Dev    devCmd    `cmd:"" group:"run" help:"Run everything in one process: to try it out, and for tests."`
	API    apiCmd    `cmd:"" name:"api" group:"run" help:"Run the HTTP API, the web pages and the metrics."`
	Worker workerCmd `cmd:"" group:"run" help:"Run the workflows (--control), or the agent beside one side's database (--agent)."`

	Migrate  migrateCmd  `cmd:"" group:"setup" help:"Bring the control database's schema up to date."`
	Site     cli.Site    `cmd:"" group:"setup" help:"List, show and add sites, the pairs of databases that are kept in sync."`
	SetupSQL setupSQLCmd `cmd:"" name:"setup-sql" group:"setup" help:"Print the SQL that sets one side up, for a DBA to read and run."`
	Setup    setupCmd    `cmd:"" group:"setup" help:"Set one side up, or repair it: run what setup-sql prints."`
	Table    cli.Table   `cmd:"" group:"setup" help:"List, show and configure the tables of a site."`
	Gate     cli.Gate    `cmd:"" group:"setup" help:"List and set the gates that hold backfills back while a database is busy."`
	Token    tokenCmd    `cmd:"" group:"setup" help:"Make, list and revoke the tokens that people and scripts sign in with."`
	Backup   backupCmd   `cmd:"" name:"backup-check" group:"setup" help:"List what to back up; with --side, say whether a control database that was restored fits the sides."`
	User     userCmd     `cmd:"" group:"setup" help:"Add, list, change and remove the people who sign in with a password."`

	Request cli.Request `cmd:"" group:"backfills" help:"Ask for a backfill of a table, or of one row."`
	List    cli.List    `cmd:"" group:"backfills" help:"List backfills, newest first."`
	Show    cli.Show    `cmd:"" group:"backfills" help:"Show one backfill."`
	Watch   cli.Watch   `cmd:"" group:"backfills" help:"Follow a backfill until its rows wait to be read, or until it is closed."`
	Rows    cli.Rows    `cmd:"" group:"backfills" help:"List the rows a backfill has staged, and what releasing each would do."`
	Approve cli.Approve `cmd:"" group:"backfills" help:"Approve the staged rows: they are sent to the other side."`
	Judge   cli.Judge   `cmd:"" group:"backfills" help:"Judge again what releasing the staged rows would do to the other side."`
	Reject  cli.Reject  `cmd:"" group:"backfills" help:"Reject the staged rows: the backfill is closed and nothing is sent."`
	Pause   cli.Pause   `cmd:"" group:"backfills" help:"Hold a walk or a release at its next page."`
	Resume  cli.Resume  `cmd:"" group:"backfills" help:"Let a paused backfill go on."`
	Cancel  cli.Cancel  `cmd:"" group:"backfills" help:"End a backfill. What was released stays released."`

	Reconcile         cli.Reconcile         `cmd:"" group:"proof" help:"Compare a table of both sides row by row; list, repair and certify what was found."`
	Cutover           cli.Cutover           `cmd:"" group:"proof" help:"Say whether the reads of a table may move to the other side; exit 0 only on yes."`
	VerifyCertificate cli.VerifyCertificate `cmd:"" name:"verify-certificate" group:"proof" help:"Check a certificate and its signature."`

	Queue   cli.Queue   `cmd:"" group:"look" help:"List changes on their way to the other side; retry or skip those set aside."`
	History cli.History `cmd:"" group:"look" help:"List changes that the other side has applied, newest first."`
	Audit   cli.Audit   `cmd:"" group:"look" help:"List who decided and configured what, newest first."`

	Config cli.ConfigCmd `cmd:"" group:"setup" help:"Check and print the settings that files, environment and command line give."`

	Files   cli.ConfigFiles  `name:"config" env:"BACKFILL_CONFIG" placeholder:"FILE" help:"A YAML file of settings: backfill config names lists them. May be repeated; later files win."`
	Version kong.VersionFlag `help:"Print the version."`
}

// Flags that several commands have.
type (
	controlFlag struct {
		Control string `required:"" env:"BACKFILL_CONTROL" placeholder:"DSN" help:"Connection string of the control database."`
	}
	temporalFlags struct {
		Temporal     string `env:"BACKFILL_TEMPORAL" placeholder:"HOST:PORT" help:"Where Temporal's frontend is. Default: TEMPORAL_ADDRESS; TLS and an API key come from Temporal's own variables, too."`
		Namespace    string `placeholder:"NAME" help:"The Temporal namespace. Default: TEMPORAL_NAMESPACE, else default."`
		TemporalKeys string `name:"temporal-keys" placeholder:"FILE" help:"Encrypt what Temporal is given with the first key of this file, and read what any of them has encrypted. All processes need it. Default: not encrypted."`
	}
	logFlags struct {
		Verbose bool `help:"Log more."`
	}
)

// stateFlag is for commands that can take what they need from a backfill dev.
type stateFlag struct {
	StateDir string `aliases:"state" env:"BACKFILL_STATE" placeholder:"DIR" help:"The state directory of a backfill dev on this machine. Default: ${state}."`
}

func (f *stateFlag) recall() (dev.Remembered, error) {
	if f.StateDir == "" {
		f.StateDir = cli.DefaultState()
	}
	return dev.Recall(f.StateDir)
}

func (t temporalFlags) temporal() serve.Temporal {
	return serve.Temporal{HostPort: t.Temporal, Namespace: t.Namespace, Environment: true, Keys: t.TemporalKeys}
}

type devCmd struct {
	StateDir string        `aliases:"state" env:"BACKFILL_STATE" placeholder:"DIR" help:"Keep everything here and go on from it when started again. Default: ${state}."`
	Listen   string        `default:"127.0.0.1:8080" placeholder:"HOST:PORT" help:"Where the API and the web pages listen (${default})."`
	Token    string        `env:"BACKFILL_TOKEN" secret:"" placeholder:"TOKEN" help:"The token to sign in with. Default: a new one, kept in the state directory."`
	Control  string        `env:"BACKFILL_CONTROL" placeholder:"DSN" help:"Connection string of a control database. Default: a PostgreSQL server of its own is started from the machine's binaries."`
	Temporal string        `env:"BACKFILL_TEMPORAL" placeholder:"HOST:PORT" help:"Where Temporal's frontend is. Default: a development server is started."`
	Site     string        `placeholder:"NAME" help:"With --side: what to call the pair of databases. Default: site."`
	Side     []namedDSN    `sep:"none" placeholder:"NAME=DSN" help:"Work on your own databases: the name and the connection string of one of the two; give it twice. Default: what it worked on before in this state directory, else a demo site."`
	Table    []string      `sep:"none" placeholder:"TABLE" help:"With --side: a table to keep in sync, as schema.table; may be repeated."`
	From     string        `placeholder:"SIDE" help:"With --side: the side whose changes are sent. Default: the first."`
	Cycle    time.Duration `default:"500ms" placeholder:"DURATION" help:"How long an idle agent waits between two cycles (${default})."`
	InOne    bool          `name:"one-database" help:"With --side: both connection strings lead to one database, in which tables go to others by mappings."`
	Demo     bool          `help:"Make the demo site: history missing on one side, and a writer that keeps changing rows."`
	logFlags
}

func (*devCmd) Help() string {
	return `Without --side it makes a demo site to play with. With --side it works on your own two databases: it sets capture up
on them, configures the tables and counts their rows. Started again on the same state directory it goes on with what it had.

It prints "ready: URL" and the token when everything answers. On the same machine, other commands find both by themselves.`
}

// Validate is kong's hook for what a single flag cannot say.
func (c *devCmd) Validate() error {
	if len(c.Side) == 0 {
		if c.Site != "" || len(c.Table) > 0 || c.From != "" || c.InOne {
			return errors.New("--site, --table, --from and --one-database are for your own databases: give --side NAME=DSN twice too")
		}
		return nil
	}
	switch {
	case len(c.Side) != 2 || c.Side[0].Name == c.Side[1].Name:
		return errors.New("a site has two sides with different names: give --side NAME=DSN twice")
	case c.Demo:
		return errors.New("--demo makes databases of its own: leave out --side or --demo")
	case c.From != "" && c.From != c.Side[0].Name && c.From != c.Side[1].Name:
		return fmt.Errorf("--from=%s is neither %s nor %s", c.From, c.Side[0].Name, c.Side[1].Name)
	}
	return nil
}

func (c *devCmd) Run(ctx context.Context, out io.Writer) error {
	o := dev.Options{
		State: c.StateDir, Listen: c.Listen, Token: c.Token, Control: c.Control, Temporal: c.Temporal, Site: c.Site, From: c.From,
		Sides: map[string]string{}, Tables: c.Table, Cycle: c.Cycle, Demo: c.Demo, InOne: c.InOne, Verbose: c.Verbose,
	}
	if o.State == "" {
		o.State = cli.DefaultState()
	}
	for _, s := range c.Side {
		o.Sides[s.Name] = s.DSN
		o.SideOrder = append(o.SideOrder, s.Name)
	}
	return dev.Run(ctx, o, out)
}

// namedDSN is a side as it is given to dev. Its errors do not repeat what was
// given: that may hold a password.
type namedDSN struct{ Name, DSN string }

func (n *namedDSN) UnmarshalText(text []byte) error {
	var ok bool
	n.Name, n.DSN, ok = strings.Cut(string(text), "=")
	// host=… is a connection string, and so is a URL with a parameter.
	if !ok || n.Name == "" || n.DSN == "" || strings.ContainsAny(n.Name, ":/ ") {
		return errors.New("write NAME=DSN, for example school=postgres://user@host/database")
	}
	return nil
}

type apiCmd struct {
	controlFlag
	temporalFlags
	Listen    string `default:"127.0.0.1:8080" placeholder:"HOST:PORT" help:"Where to listen (${default})."`
	Console   string `placeholder:"URL" help:"Where Temporal's web console is, for links to it. Default: no links."`
	PublicURL string `name:"public-url" placeholder:"URL" help:"Where people reach this API, for links to it. Default: no links."`

	TrustFrom []netip.Prefix `placeholder:"CIDR" help:"A network that proxies connect from: of them X-Forwarded-For is believed; may be repeated. Default: none."`
	OIDC      oidcFlags      `embed:"" prefix:"oidc-"`

	TrustHeader string `placeholder:"NAME" help:"The header in which those proxies name the user who has signed in there, such as X-Remote-User. They must take it out of what clients send. Default: none is believed."`
	logFlags
}

// Validate is kong's hook for what a single flag cannot say.
func (c *apiCmd) Validate() error {
	if c.TrustHeader != "" && len(c.TrustFrom) == 0 {
		return errors.New("--trust-header needs --trust-from: from anywhere else, anybody could be anybody")
	}
	return c.OIDC.check(c.PublicURL)
}

func (c *apiCmd) Run(ctx context.Context, out io.Writer) error {
	log, err := serve.NewLog(c.Verbose)
	if err != nil {
		return err
	}
	stop, err := serve.Trace(ctx, "api", log)
	if err != nil {
		return err
	}
	defer stop()
	return serve.API{Control: c.Control, Temporal: c.temporal(), Listen: c.Listen, Console: c.Console, PublicURL: c.PublicURL, Trust: api.Trust{From: c.TrustFrom, Header: c.TrustHeader}, Provider: c.OIDC.provider(c.PublicURL), Log: log, Out: out}.Run(ctx)
}

type workerCmd struct {
	Control  bool      `xor:"role" env:"-" required:"" help:"Run workflows and what they do on the control database."`
	Agent    agentName `xor:"role" env:"-" required:"" placeholder:"SITE/SIDE" help:"Run the agent of this side. It alone needs to reach the side's database."`
	Database string    `env:"BACKFILL_DATABASE" placeholder:"DSN" help:"With --agent: connection string of the side's database."`

	Cycle        time.Duration `default:"500ms" placeholder:"DURATION" help:"With --agent: how long an idle agent waits before it looks for changes again (${default})."`
	Refused      int64         `name:"refused-limit" default:"1000" placeholder:"N" help:"With --agent: how many rows of a table may be refused here in a row before the table's changes stop (${default})."`
	Metrics      string        `placeholder:"HOST:PORT" help:"Where to show this process's figures to Prometheus, at /metrics, and its health, at /healthz and /readyz. Default: nowhere."`
	KeepRequests time.Duration `default:"2160h" placeholder:"DURATION" help:"With --control: how long closed backfills are kept with their staged rows (${default})."`
	KeepHistory  time.Duration `default:"720h" placeholder:"DURATION" help:"With --control: how long applied changes are kept (${default})."`
	KeepAudit    time.Duration `placeholder:"DURATION" help:"With --control: how long the record of who did what is kept. Default: for ever."`
	WalksPerSide int           `default:"2" placeholder:"N" help:"With --agent: how many tables of its side may be walked at once; others take turns (${default})."`
	WalksInAll   int           `default:"8" placeholder:"N" help:"With --agent: how many tables of all sides may be walked at once (${default})."`

	Deployment string `and:"version" placeholder:"NAME" help:"With --control and --build: the worker deployment this process is a version of. Default: it is not versioned."`
	Build      string `and:"version" placeholder:"ID" help:"With --deployment: the version. Backfills and reconciliations end on the version they began on."`

	PublicURL string `name:"public-url" placeholder:"URL" help:"With --control: where people reach the API, for links in Temporal's console."`

	ControlDatabase string `required:"" env:"BACKFILL_CONTROL" placeholder:"DSN" help:"Connection string of the control database."`
	temporalFlags
	logFlags
}

// Validate is kong's hook for what a single flag cannot say.
func (c *workerCmd) Validate() error {
	if !c.Control && c.Agent != (agentName{}) && c.Database == "" {
		return errors.New("missing flag: --database=DSN, which --agent works on")
	}
	return nil
}

func (c *workerCmd) Run(ctx context.Context) error {
	log, err := serve.NewLog(c.Verbose)
	if err != nil {
		return err
	}
	role := "control"
	if !c.Control {
		role = "agent"
	}
	stop, err := serve.Trace(ctx, role, log)
	if err != nil {
		return err
	}
	defer stop()
	engine := c.temporal()
	engine.Deployment, engine.Build = c.Deployment, c.Build
	w := serve.Worker{Control: c.ControlDatabase, Temporal: engine, PublicURL: c.PublicURL, Metrics: c.Metrics, Log: log}
	if c.Control {
		return w.RunControl(ctx, control.Keep{Requests: c.KeepRequests, History: c.KeepHistory, Audit: c.KeepAudit})
	}
	return w.RunAgent(ctx, c.Agent.Site, c.Agent.Side, c.Database, activities.Settings{Cycle: c.Cycle, RefusedLimit: c.Refused,
		Walks: control.Limits{Side: c.WalksPerSide, All: c.WalksInAll}})
}

// agentName is the side that an agent works beside.
type agentName struct{ Site, Side string }

func (a *agentName) UnmarshalText(text []byte) error {
	var ok bool
	if a.Site, a.Side, ok = strings.Cut(string(text), "/"); !ok || a.Site == "" || a.Side == "" {
		return errors.New("write SITE/SIDE, for example maple/school")
	}
	return nil
}

type migrateCmd struct{ controlFlag }

func (c *migrateCmd) Run(ctx context.Context, out io.Writer) error {
	done, err := control.Migrate(ctx, c.Control)
	if err != nil {
		return err
	}
	if len(done) == 0 {
		_, err = fmt.Fprintln(out, "the control database is up to date")
		return err
	}
	_, err = fmt.Fprintf(out, "the control database was brought to version %d\n", done[len(done)-1])
	return err
}

// sideFlags say which side to set up, and where it and the control database are.
type sideFlags struct {
	Site     string   `required:"" placeholder:"SITE" help:"The site."`
	Side     string   `required:"" placeholder:"SIDE" help:"Which of its two sides."`
	Control  string   `env:"BACKFILL_CONTROL" placeholder:"DSN" help:"Connection string of the control database, which knows the site's tables. Default: the one in the state directory."`
	Database string   `env:"BACKFILL_DATABASE" placeholder:"DSN" help:"Connection string of the side's database, as somebody who may create schemas and triggers. Default: the one in the state directory."`
	Role     string   `placeholder:"ROLE" help:"The role the side's agent signs in as. Default: the one of --database."`
	Owner    string   `placeholder:"ROLE" help:"The role that is to own the schema and the functions that record keys; it needs no login, and is made if it is not there. Default: one named after the schema, or where no role can be made the one of --database."`
	Table    []string `sep:"none" placeholder:"TABLE" help:"Also give the agent's role its rights on this table, which is not configured yet; may be repeated."`
	stateFlag
}

// setup takes what was not given from the state directory of a backfill dev.
func (c *sideFlags) setup() (serve.Setup, error) {
	s := serve.Setup{Control: c.Control, Database: c.Database, Site: c.Site, Side: c.Side, Roles: side.Roles{Agent: c.Role, Owner: c.Owner}, Tables: c.Table}
	if s.Control != "" && s.Database != "" {
		return s, nil
	}
	r, err := c.recall()
	if err != nil {
		return s, fmt.Errorf("give --control and --database, or the state directory of a backfill dev with --state-dir: %w", err)
	}
	if s.Control == "" {
		s.Control = r.Control
	}
	if s.Database == "" {
		s.Database = r.Sides[c.Side]
	}
	return s, nil
}

type setupSQLCmd struct{ sideFlags }

func (c *setupSQLCmd) Run(ctx context.Context, out io.Writer) error {
	s, err := c.setup()
	if err != nil {
		return err
	}
	steps, err := s.Steps(ctx, false)
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, side.Script(steps))
	return err
}

type setupCmd struct{ sideFlags }

func (c *setupCmd) Run(ctx context.Context, out io.Writer) error {
	s, err := c.setup()
	if err != nil {
		return err
	}
	steps, err := s.Steps(ctx, true)
	if err != nil {
		return err
	}
	for _, step := range steps {
		if _, err := fmt.Fprintln(out, "done: "+step.Title); err != nil {
			return err
		}
	}
	return nil
}

type backupCmd struct {
	controlFlag
	Side []sideDSN `sep:"none" placeholder:"SITE/SIDE=DSN" help:"The connection string of a side's database, as its agent has it; once for each side. Default: only list what to back up."`
}

func (*backupCmd) Help() string {
	return `Run it after a restore, before anything is started: it reads, and changes nothing. It exits 0 when all fits, and with 3
says what does not and what to do about it.`
}

func (c *backupCmd) Run(ctx context.Context, out io.Writer) error {
	check := serve.BackupCheck{Control: c.Control, Sides: map[string]string{}}
	for _, s := range c.Side {
		check.Sides[s.Site+"/"+s.Side] = s.DSN
	}
	return check.Run(ctx, out)
}

// sideDSN is where a side's database is. Its errors do not repeat what was given: that
// may hold a password.
type sideDSN struct {
	agentName
	DSN string
}

func (s *sideDSN) UnmarshalText(text []byte) error {
	name, dsn, ok := strings.Cut(string(text), "=")
	if !ok || dsn == "" || s.agentName.UnmarshalText([]byte(name)) != nil || strings.ContainsAny(s.Site+s.Side, ":/ ") {
		return errors.New("write SITE/SIDE=DSN, for example maple/school=postgres://user@host/database")
	}
	s.DSN = dsn
	return nil
}

type tokenCmd struct {
	Create tokenCreateCmd `cmd:"" group:"commands" help:"Make a token and print it, this once. The same name again replaces the token."`
	List   tokenListCmd   `cmd:"" default:"withargs" group:"commands" help:"List the tokens, revoked ones too."`
	Revoke tokenRevokeCmd `cmd:"" group:"commands" help:"End a token."`
}

// tokenFlags say where the tokens are kept.
type tokenFlags struct {
	Control string `env:"BACKFILL_CONTROL" placeholder:"DSN" help:"Connection string of the control database. Default: the one in the state directory."`
	stateFlag
}

func (f *tokenFlags) withStore(ctx context.Context, fn func(*control.Store) error) error {
	if f.Control == "" {
		r, err := f.recall()
		if err != nil {
			return fmt.Errorf("give --control, or the state directory of a backfill dev with --state-dir: %w", err)
		}
		f.Control = r.Control
	}
	s, err := control.Open(ctx, f.Control)
	if err != nil {
		return err
	}
	defer s.Disconnect()
	return fn(s)
}

// operator is who runs a command on the control database itself, for the audit: there is
// no account, but a user of the machine.
func operator() string {
	name := fmt.Sprintf("uid %d", os.Getuid())
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	return name
}

type tokenCreateCmd struct {
	tokenFlags
	Name string `arg:"" help:"Whose it is; it stands in every record of what is done with it."`
	rightsFlags
	Expires time.Duration `placeholder:"DURATION" help:"How long it is valid, such as 720h. Default: until it is revoked."`
}

// rightsFlags say what an account may do, and where.
type rightsFlags struct {
	Role string   `required:"" enum:"viewer,requester,reviewer,admin" placeholder:"ROLE" help:"What it may do: viewer, requester, reviewer or admin; each includes the ones before it."`
	Site []string `sep:"none" placeholder:"SITE" help:"Where it may do that, as SITE, or as SITE=ROLE where the role is another; may be repeated. Default: on every site."`
}

func (f *rightsFlags) rights() (control.Rights, error) {
	return control.ParseRights(control.Role(f.Role), f.Site)
}

// Validate is kong's hook for what a single flag cannot say.
func (c *tokenCreateCmd) Validate() error {
	if c.Expires < 0 {
		return errors.New("--expires must be positive")
	}
	return nil
}

func (c *tokenCreateCmd) Run(ctx context.Context, out io.Writer) error {
	return c.withStore(ctx, func(s *control.Store) error {
		rights, err := c.rights()
		if err != nil {
			return err
		}
		t, secret := control.Token{Name: c.Name, Rights: rights}, control.NewSecret()
		if c.Expires != 0 {
			until := time.Now().Add(c.Expires)
			t.ExpiresAt = &until
		}
		if err := s.CreateToken(ctx, operator(), t, secret); err != nil {
			return err
		}
		_, err = fmt.Fprintln(out, secret)
		return err
	})
}

type tokenListCmd struct{ tokenFlags }

func (c *tokenListCmd) Run(ctx context.Context, out io.Writer) error {
	return c.withStore(ctx, func(s *control.Store) error {
		tokens, err := s.Tokens(ctx)
		if err != nil {
			return err
		}
		return cli.PrintTokens(out, tokens)
	})
}

type tokenRevokeCmd struct {
	tokenFlags
	Name string `arg:"" help:"The token's name."`
}

func (c *tokenRevokeCmd) Run(ctx context.Context) error {
	return c.withStore(ctx, func(s *control.Store) error { return s.RevokeToken(ctx, operator(), c.Name) })
}

type userCmd struct {
	Create userCreateCmd `cmd:"" group:"commands" help:"Add a person. The password is asked for, or read from standard input."`
	List   userListCmd   `cmd:"" default:"withargs" group:"commands" help:"List the people."`
	Set    userSetCmd    `cmd:"" group:"commands" help:"Give a person another role, or with --password another password, which ends their sessions."`
	Remove userRemoveCmd `cmd:"" group:"commands" help:"Remove a person and end their sessions. What they did stays on record."`
}

type userCreateCmd struct {
	tokenFlags
	Name string `arg:"" help:"Whose it is; it stands in every record of what they do."`
	rightsFlags
	NoPassword bool `help:"Without a password: they are known by what a trusted proxy says, and cannot sign in here."`
}

func (c *userCreateCmd) Run(ctx context.Context, streams *cli.Streams) error {
	rights, err := c.rights()
	if err != nil {
		return err
	}
	return c.withStore(ctx, func(s *control.Store) error {
		password := ""
		if !c.NoPassword {
			if password, err = cli.ReadPassword(os.Stdin, streams.Err, c.Name); err != nil {
				return err
			}
		}
		if err := s.CreateUser(ctx, operator(), c.Name, rights, password); err != nil {
			return err
		}
		_, err = fmt.Fprintf(streams.Out, "added: %s\n", c.Name)
		return err
	})
}

type userListCmd struct{ tokenFlags }

func (c *userListCmd) Run(ctx context.Context, out io.Writer) error {
	return c.withStore(ctx, func(s *control.Store) error {
		users, err := s.Users(ctx)
		if err != nil {
			return err
		}
		return cli.PrintUsers(out, users)
	})
}

type userSetCmd struct {
	tokenFlags
	Name     string   `arg:"" help:"Their name."`
	Role     string   `enum:",viewer,requester,reviewer,admin" default:"" placeholder:"ROLE" help:"What they may do from now on: viewer, requester, reviewer or admin. Default: as before."`
	Site     []string `sep:"none" placeholder:"SITE" help:"With --role: where they may do that, as SITE, or as SITE=ROLE where the role is another; may be repeated. Default: on every site."`
	Password bool     `help:"Ask for another password, or read it from standard input."`
}

// Validate is kong's hook for what a single flag cannot say.
func (c *userSetCmd) Validate() error {
	switch {
	case c.Role == "" && len(c.Site) > 0:
		return errors.New("--site goes with --role")
	case c.Role == "" && !c.Password:
		return errors.New("give --role or --password")
	}
	return nil
}

func (c *userSetCmd) Run(ctx context.Context, streams *cli.Streams) error {
	var rights *control.Rights
	if c.Role != "" {
		r, err := control.ParseRights(control.Role(c.Role), c.Site)
		if err != nil {
			return err
		}
		rights = &r
	}
	return c.withStore(ctx, func(s *control.Store) error {
		var password *string
		if c.Password {
			p, err := cli.ReadPassword(os.Stdin, streams.Err, c.Name)
			if err != nil {
				return err
			}
			password = &p
		}
		if err := s.SetUser(ctx, operator(), c.Name, rights, password); err != nil {
			return err
		}
		_, err := fmt.Fprintf(streams.Out, "changed: %s\n", c.Name)
		return err
	})
}

type userRemoveCmd struct {
	tokenFlags
	Name string `arg:"" help:"Their name."`
}

func (c *userRemoveCmd) Run(ctx context.Context, out io.Writer) error {
	return c.withStore(ctx, func(s *control.Store) error {
		if err := s.RemoveUser(ctx, operator(), c.Name); err != nil {
			return err
		}
		_, err := fmt.Fprintf(out, "removed: %s\n", c.Name)
		return err
	})
}
