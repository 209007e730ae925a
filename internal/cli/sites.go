package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"backfill/api/client"
	"backfill/internal/backfill"
)

// Site has the commands about sites.
type Site struct {
	List     SiteList     `cmd:"" group:"commands" default:"withargs" help:"List the sites."`
	Show     SiteShow     `cmd:"" group:"commands" help:"Show a site: its sides, their agents, and what waits."`
	NewEpoch SiteNewEpoch `cmd:"" name:"new-epoch" group:"commands" help:"Declare a new beginning after a database was restored or failed over. Needs role admin."`
	Set      SiteSet      `cmd:"" group:"commands" help:"Change a site's settings. Needs role admin."`
	Add      SiteAdd      `cmd:"" group:"commands" help:"Record a new site, a pair of databases to keep in sync. Needs role admin."`
}

// SiteList lists the sites.
type SiteList struct{ Remote }

func (c *SiteList) Run(ctx context.Context, s *session) error {
	a, err := s.c.ListSites(ctx)
	if err != nil {
		return err
	}
	return answer(s, a, func(p *client.Page[client.Site]) {
		t := s.table("SITE", "SIDES", "WAITING", "AGENTS")
		for _, x := range p.Data {
			var sides, agents []string
			var waiting int64
			for _, side := range x.Sides {
				sides = append(sides, side.Name)
				agents = append(agents, side.Name+" "+seen(&side))
			}
			for _, l := range x.Lag {
				waiting += l.Waiting
			}
			t.row(x.Name, strings.Join(sides, ", "), waiting, strings.Join(agents, ", "))
		}
		t.flush()
		if len(p.Data) == 0 {
			s.note.printf("none: backfill site add makes one\n")
		}
	})
}

func seen(x *client.Side) string {
	if x.SeenAt == nil {
		return "never seen"
	}
	return "seen " + ago(x.SeenAt)
}

// SiteNewEpoch opens a new epoch.
type SiteNewEpoch struct {
	Remote
	Name string `arg:"" help:"The site."`
	Note string `required:"" placeholder:"TEXT" help:"Why; it is kept."`
}

func (c *SiteNewEpoch) Help() string {
	return `Call it once the databases are the ones to go on with. Open backfills end FAILED; what was not delivered yet is
not delivered any more, because nobody can tell what the receiver already had. Backfill and compare every table.`
}

func (c *SiteNewEpoch) Run(ctx context.Context, s *session) error {
	a, err := s.c.NewEpoch(ctx, c.Name, client.NewEpochJSONBody{Note: &c.Note})
	if err != nil {
		return err
	}
	return answer(s, a, func(x *client.Site) {
		s.out.printf("site %s is in epoch %d: backfill and compare every table\n", x.Name, x.Epoch)
	})
}

// SiteShow shows one site.
type SiteShow struct {
	Remote
	Name string `arg:"" optional:"" help:"The site. May be left out when there is only one."`
}

func (c *SiteShow) Run(ctx context.Context, s *session) error {
	name, err := s.site(ctx, c.Name)
	if err != nil {
		return err
	}
	a, err := s.c.GetSite(ctx, name)
	if err != nil {
		return err
	}
	return answer(s, a, s.showSite)
}

func (s *session) showSite(x *client.Site) {
	s.out.printf("site %s\n\n", x.Name)
	if x.SecondPerson {
		s.out.printf("whoever asked for a backfill may not approve it\n\n")
	}
	t := s.table("SIDE", "AGENT", "SEEN", "DATABASE", "PROBLEM")
	for _, side := range x.Sides {
		t.row(side.Name, dash(plain(side.Agent)), ago(side.SeenAt), dash(plain(side.Database)), plain(side.Problem))
	}
	t.flush()
	s.out.printf("\n")
	for _, x := range x.Standstill {
		s.out.printf("stands still: %s (%s)\n", x.Message, sinceOf(x.Since))
	}
	if len(x.Standstill) > 0 {
		s.out.printf("\n")
	}
	t = s.table("DIRECTION", "WAITING", "OLDEST", "APPLIED", "IN OUTBOX", "AS OF")
	for _, l := range x.Lag {
		oldest := "–"
		if l.Oldest != nil {
			oldest = ago(l.Oldest)
		}
		t.row(l.From+" → "+l.To, l.Waiting, oldest, ago(l.AppliedAt), l.Outbox, ago(l.OutboxAt))
	}
	t.flush()
}

// SiteSet changes a site.
type SiteSet struct {
	Remote
	Name         string `arg:"" help:"The site."`
	SecondPerson string `required:"" enum:"on,off" placeholder:"on|off" help:"on: whoever asked for a backfill may not approve it."`
}

func (c *SiteSet) Run(ctx context.Context, s *session) error {
	a, err := s.c.ChangeSite(ctx, c.Name, client.ChangeSiteJSONBody{SecondPerson: c.SecondPerson == "on"})
	if err != nil {
		return err
	}
	return answer(s, a, func(x *client.Site) {
		s.out.printf("site %s: whoever asked for a backfill %s approve it\n", x.Name, map[bool]string{true: "may not", false: "may"}[x.SecondPerson])
	})
}

func sinceOf(t *time.Time) string {
	if t == nil {
		return "never seen"
	}
	return "since " + ago(t)
}

// SiteAdd records a site.
type SiteAdd struct {
	Remote
	Name  string   `arg:"" help:"Its name: 1 to 40 of a-z, 0-9, _ and -, beginning with a letter."`
	Side  []string `required:"" placeholder:"SIDE" help:"The name of one of its two sides; give it twice."`
	InOne bool     `name:"one-database" help:"Both sides are in one database: each table goes to another one there, by a mapping."`
}

// Validate is kong's hook for what a single flag cannot say.
func (c *SiteAdd) Validate() error {
	if len(c.Side) != 2 {
		return fmt.Errorf("a site has two sides: give --side twice")
	}
	return nil
}

func (c *SiteAdd) Run(ctx context.Context, s *session) error {
	a, err := s.c.CreateSite(ctx, client.CreateSiteJSONBody{Name: c.Name, Sides: c.Side, OneDatabase: given(c.InOne)})
	if err != nil {
		return err
	}
	return answer(s, a, func(x *client.Site) {
		s.out.printf("added site %s with sides %s\n", x.Name, strings.Join(c.Side, " and "))
	})
}

// Table has the commands about tables.
type Table struct {
	List   TableList   `cmd:"" group:"commands" default:"withargs" help:"List a site's tables: rows on both sides, what waits, and whether a backfill may be requested."`
	Show   TableShow   `cmd:"" group:"commands" help:"Show a table and each condition for a backfill of it."`
	Set    TableSet    `cmd:"" group:"commands" help:"Add a table to a site, or change how it is kept in sync. Needs role admin."`
	Apply  TableApply  `cmd:"" group:"commands" help:"Configure the tables of a file, with mappings for those that have another shape on the receiver. Needs role admin."`
	Remove TableRemove `cmd:"" group:"commands" help:"Take a table out of a site. Needs role admin."`
}

// OneSite is the flag that says which site.
type OneSite struct {
	Site string `placeholder:"SITE" help:"The site. May be left out when there is only one."`
}

// TableList lists the tables of a site.
type TableList struct {
	Remote
	OneSite
}

func (c *TableList) Run(ctx context.Context, s *session) error {
	a, err := s.tables(ctx, c.Site)
	if err != nil {
		return err
	}
	return answer(s, a, func(p *client.Page[client.Panel]) {
		t := s.table("TABLE", "DIRECTION", "SOURCE", "RECEIVER", "COUNTED", "WAITING", "BACKFILL")
		for _, x := range p.Data {
			t.row(x.Table, x.From+" → "+x.To, counted(&x, x.SourceRows), counted(&x, x.ReceiverRows), ago(x.CountedAt), x.Lag.Waiting, button(&x))
		}
		t.flush()
		if len(p.Data) == 0 {
			s.note.printf("none: backfill table set configures one\n")
		}
	})
}

func (s *session) tables(ctx context.Context, given string) (a client.Answer[client.Page[client.Panel]], err error) {
	site, err := s.site(ctx, given)
	if err != nil {
		return a, err
	}
	return s.c.ListTables(ctx, site)
}

// counted is a count of rows as it is shown.
func counted(x *client.Panel, n *int64) right {
	switch {
	case n == nil:
		return "–"
	case x.Estimated:
		return right("~" + thousands(*n))
	}
	return right(thousands(*n))
}

// button is what stands on the table's button in the web pages.
func button(x *client.Panel) string {
	b := &x.Backfill
	switch {
	case b.State != nil:
		return phase(&client.Backfill{State: *b.State, Percent: b.Percent}) + ", request " + id(plain(b.ID))
	case b.CanRequest:
		return "may be requested"
	}
	for _, c := range b.Conditions {
		if !c.OK {
			return "no: " + c.Message
		}
	}
	return "no"
}

// TableShow shows one table.
type TableShow struct {
	Remote
	OneSite
	Table string `arg:"" help:"The table, as schema.table."`
}

func (c *TableShow) Run(ctx context.Context, s *session) error {
	name, err := backfill.ParseTableName(c.Table)
	if err != nil {
		return err
	}
	a, err := s.tables(ctx, c.Site)
	if err != nil {
		return err
	}
	var raw struct{ Data []json.RawMessage }
	if err := json.Unmarshal(a.Raw, &raw); err != nil {
		return err
	}
	found := false
	for i, x := range a.Value.Data {
		if x.Table != name.String() {
			continue
		}
		found = true
		if err := answer(s, client.Answer[client.Panel]{Value: x, Raw: raw.Data[i]}, s.showPanel); err != nil {
			return err
		}
	}
	if !found {
		return fmt.Errorf("table %s is not configured, or is captured from no side: backfill table list shows the tables there are", name)
	}
	return nil
}

func (s *session) showPanel(x *client.Panel) {
	s.out.printf("table %s, %s → %s\n", x.Table, x.From, x.To)
	line := func(name, text string) { s.out.printf("  %s%s\n", fmt.Sprintf("%-13s", name), text) }
	line("configured", describe(&client.Table{Table: x.Table, Active: x.Active, Create: x.Create, Update: x.Update, Delete: x.Delete,
		CapturedFrom: x.CapturedFrom, Conflict: x.Conflict, ApplyOrder: x.ApplyOrder, Mapping: x.Mapping}))
	line("key", dash(strings.Join(x.Key, ", ")))
	if m := x.Mapping; m != nil {
		for _, column := range slices.Sorted(maps.Keys(m.Columns)) {
			line("", column+" = "+m.Columns[column])
		}
		for _, name := range slices.Sorted(maps.Keys(m.Prove)) {
			line("", "to be proven, "+name+": "+m.Prove[name].Source+" => "+m.Prove[name].Target)
		}
	}
	line("rows", fmt.Sprintf("%s on %s, %s on %s, counted %s", counted(x, x.SourceRows), x.From, counted(x, x.ReceiverRows), x.To, ago(x.CountedAt)))
	line("waiting", thousands(x.Lag.Waiting)+" changes")
	if x.Stopped != nil {
		line("stopped", ago(&x.Stopped.Since)+", too many rows in a row were refused on "+x.To+", the last with: "+x.Stopped.Reason)
	}
	line("backfill", button(x))
	for _, c := range x.Backfill.Conditions {
		mark := "no   "
		if c.OK {
			mark = "yes  "
		}
		line("", mark+c.Message)
	}
}

// describe says how a table is kept in sync.
func describe(t *client.Table) string {
	active := "active"
	if !t.Active {
		active = "not active"
	}
	var ops []string
	for _, op := range []struct {
		name string
		on   bool
	}{{"create", t.Create}, {"update", t.Update}, {"delete", t.Delete}} {
		if op.on {
			ops = append(ops, op.name)
		}
	}
	conflict := ""
	switch winner := plain(t.Conflict); winner {
	case "":
	case "quarantine":
		conflict = ", conflicts are quarantined"
	default:
		conflict = ", " + winner + " wins conflicts"
	}
	mapped := ""
	if m := t.Mapping; m != nil {
		mapped = fmt.Sprintf(", %s → %s by mapping %d", cmp.Or(plain(m.Source), t.Table), cmp.Or(plain(m.Target), t.Table), m.Version)
	}
	return fmt.Sprintf("%s, sends %s from %s%s, apply order %d%s", active, orNone(ops), orNone(t.CapturedFrom), conflict, t.ApplyOrder, mapped)
}

func orNone(words []string) string {
	if len(words) == 0 {
		return "nothing"
	}
	return strings.Join(words, ", ")
}

// TableSet configures a table.
type TableSet struct {
	Remote
	OneSite
	Table      string   `arg:"" help:"The table, as schema.table, each part quoted as in SQL when it holds a dot."`
	From       []string `placeholder:"SIDE" help:"The sides whose changes are sent. A new table needs it."`
	Active     *bool    `negatable:"" help:"Whether agents fetch the table at all. Changes of a table that is not active are dropped."`
	Create     *bool    `negatable:"" help:"Whether rows that are new are sent."`
	Update     *bool    `negatable:"" help:"Whether rows that have changed are sent."`
	Delete     *bool    `negatable:"" help:"Whether deletions are sent."`
	Conflict   *string  `placeholder:"POLICY" help:"With both sides in --from: the side whose change wins when both have changed a row, or quarantine."`
	Exclude    []string `placeholder:"COLUMN" help:"Columns that are neither sent nor compared, and stay as they are on the receiver; all of them each time, none for '\"\"'."`
	ApplyOrder *int     `placeholder:"N" help:"Tables with a lower number are applied first: parents before children."`
}

func (c *TableSet) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	a, err := s.c.PutTable(ctx, site, c.Table, client.PutTableJSONBody{Active: c.Active, Create: c.Create, Update: c.Update, Delete: c.Delete,
		CapturedFrom: c.From, Conflict: c.Conflict, ApplyOrder: c.ApplyOrder, Excluded: excluded(c.Exclude)})
	if err != nil {
		return err
	}
	return answer(s, a, s.showTable)
}

func (s *session) showTable(t *client.Table) { s.out.printf("table %s: %s\n", t.Table, describe(t)) }

// excluded is nil when nothing was said, and empty for none.
func excluded(given []string) *[]string {
	if given == nil {
		return nil
	}
	given = slices.DeleteFunc(given, func(name string) bool { return name == "" })
	return &given
}

// TableRemove takes a table out of a site.
type TableRemove struct {
	Remote
	OneSite
	Table string `arg:"" help:"The table, as schema.table."`
}

func (c *TableRemove) Help() string {
	return `Refused while a request of the table is open. Changes on their way are dropped; history stays. Run backfill setup for
each side then, or what setup-sql prints: it drops the triggers that capture the table.`
}

func (c *TableRemove) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	a, err := s.c.RemoveTable(ctx, site, c.Table)
	if err != nil {
		return err
	}
	return answer(s, a, func(t *client.Table) {
		s.out.printf("removed table %s from site %s: run backfill setup for each side, to drop its triggers\n", t.Table, site)
	})
}

// Queue has the commands about changes on their way.
type Queue struct {
	List  QueueList  `cmd:"" group:"commands" default:"withargs" help:"List the changes that the receiving side has not applied, oldest first."`
	Retry QueueRetry `cmd:"" group:"commands" help:"Have the receiving side try a change again that it has set aside."`
	Skip  QueueSkip  `cmd:"" group:"commands" help:"Have the receiving side give up a change that it has set aside. Its row can be backfilled later."`
}

// Changes has the filters of queue and history.
type Changes struct {
	OneSite
	Paging
	Table string   `placeholder:"TABLE" help:"Of this table only, as schema.table."`
	From  string   `placeholder:"SIDE" help:"Sent by this side only."`
	Key   []string `sep:"none" placeholder:"V" help:"Of the row with this key only: its values in key order, one flag each, or a JSON array of them."`
}

// QueueList lists the queue.
type QueueList struct {
	FilteredRemote
	Changes
	State string `placeholder:"STATE" help:"In this state only: waiting, stopped (with its table), held (for a row it refers to), quarantined or skipped."`
}

func (c *QueueList) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	key, err := keyValues(c.Key)
	if err != nil {
		return err
	}
	params := client.ListQueueParams{Table: given(c.Table), From: given(c.From), Key: key, State: given(client.ListQueueParamsState(strings.ToLower(c.State)))}
	t := s.table("SEQ", "TABLE", "FROM", "OP", "KEY", "STATE", "QUEUED", "REASON")
	_, err = list(s, c.Paging, t, func(x *client.Change) {
		t.row(right(id(x.Seq)), x.Table, x.From, string(x.Op), keyLine(x.Key), string(x.State), ago(&x.CreatedAt), x.Reason)
	}, func(cursor *client.Cursor, n *client.Limit) (client.Answer[client.Page[client.Change]], error) {
		params.Cursor, params.Limit = cursor, n
		return s.c.ListQueue(ctx, site, &params)
	})
	return err
}

// Wish asks something of a change in the queue.
type Wish struct {
	Remote
	OneSite
	Seq int64 `arg:"" help:"The change's number, as backfill queue shows it."`
}

func (c *Wish) run(ctx context.Context, s *session, wish func(context.Context, string, int64) (client.Answer[client.Wish], error), done string) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	a, err := wish(ctx, site, c.Seq)
	if err != nil {
		return err
	}
	return answer(s, a, func(*client.Wish) { s.out.printf("change %s of site %s %s\n", id(c.Seq), site, done) })
}

// QueueRetry has a change tried again.
type QueueRetry struct{ Wish }

func (c *QueueRetry) Run(ctx context.Context, s *session) error {
	return c.run(ctx, s, s.c.RetryChange, "will be tried again on the receiving agent's next cycle")
}

// QueueSkip has a change given up.
type QueueSkip struct{ Wish }

func (c *QueueSkip) Run(ctx context.Context, s *session) error {
	return c.run(ctx, s, s.c.SkipChange, "will be skipped on the receiving agent's next cycle")
}

// History lists what was applied.
type History struct {
	Remote
	Changes
	Lost bool `help:"Just the versions that lost a conflict, of tables captured from both sides."`
}

func (c *History) Run(ctx context.Context, s *session) error {
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	key, err := keyValues(c.Key)
	if err != nil {
		return err
	}
	params := client.ListHistoryParams{Table: given(c.Table), From: given(c.From), Key: key}
	if c.Lost {
		params.State = new(client.ListHistoryParamsStateLost)
	}
	t := s.table("SEQ", "TABLE", "FROM", "OP", "KEY", "REQUEST", "STATE", "APPLIED", "REASON")
	_, err = list(s, c.Paging, t, func(x *client.Change) {
		request := right("–")
		if x.Request != nil {
			request = right(id(*x.Request))
		}
		t.row(right(id(x.Seq)), x.Table, x.From, string(x.Op), keyLine(x.Key), request, string(x.State), ago(x.AppliedAt), x.Reason)
	}, func(cursor *client.Cursor, n *client.Limit) (client.Answer[client.Page[client.Change]], error) {
		params.Cursor, params.Limit = cursor, n
		return s.c.ListHistory(ctx, site, &params)
	})
	return err
}

// Audit lists who did what.
type Audit struct {
	Remote
	Paging
	Site string `placeholder:"SITE" help:"Of this site only."`
}

func (c *Audit) Run(ctx context.Context, s *session) error {
	t := s.table("WHEN", "ACCOUNT", "FROM", "ACTION", "SITE", "SUBJECT", "DETAIL")
	params := client.ListAuditParams{Site: given(c.Site)}
	_, err := list(s, c.Paging, t, func(x *client.AuditEntry) {
		t.row(x.At.Local().Format(time.DateTime), x.Account, dash(strings.TrimSpace(x.Via+" "+x.Address)), x.Action, dash(plain(x.Site)), x.Subject, detail(x.Detail))
	}, func(cursor *client.Cursor, n *client.Limit) (client.Answer[client.Page[client.AuditEntry]], error) {
		params.Cursor, params.Limit = cursor, n
		return s.c.ListAudit(ctx, &params)
	})
	return err
}

// detail is an object on one line; "" when there is nothing in it.
func detail(raw json.RawMessage) string {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil || slices.Contains([]string{"{}", "null"}, b.String()) {
		return ""
	}
	return b.String()
}
