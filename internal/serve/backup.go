package serve

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"backfill/activities"
	"backfill/internal/backfill"
	"backfill/internal/control"
	"backfill/internal/side"
)

// BackupCheck says what has to be backed up, and whether a control database that was
// restored fits the sides.
type BackupCheck struct {
	Control string            // connection string
	Sides   map[string]string // SITE/SIDE → connection string
}

// Run prints what it finds. Its error is Refused unless all sides fit.
func (c BackupCheck) Run(ctx context.Context, out io.Writer) error {
	store, err := control.Open(ctx, c.Control)
	if err != nil {
		return err
	}
	defer store.Disconnect()
	sites, err := store.Sites(ctx)
	if err != nil {
		return err
	}
	if len(c.Sides) == 0 {
		return c.list(ctx, store, sites, out)
	}
	left := map[string]string{}
	for name, dsn := range c.Sides {
		left[name] = dsn
	}
	var wrong, unseen []string
	for _, site := range sites {
		for _, n := range site.Sides {
			name := site.Name + "/" + n.Name
			dsn, given := left[name]
			delete(left, name)
			if !given {
				unseen = append(unseen, name)
				fmt.Fprintf(out, "%s: not looked at: give --side %s=DSN\n", name, name)
				continue
			}
			stands, err := match(ctx, store, site, n.Name, dsn)
			if backfill.CodeOf(err) == backfill.Refused {
				wrong = append(wrong, name)
				fmt.Fprintf(out, "%s: does not fit: %s\n", name, strings.ReplaceAll(err.Error(), "\n", "; and "))
				continue
			}
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "%s: fits: %s\n", name, stands)
		}
	}
	for name := range left {
		return backfill.Errorf(backfill.Refused, "the control database knows no side %s: it was restored from before that was added, or the name is another", name)
	}
	last, err := store.LastRecord(ctx)
	if err != nil {
		return err
	}
	if !last.IsZero() {
		fmt.Fprintf(out, "The last decision or change of configuration on record here is of %s: what was approved, rejected, configured, revoked or removed later is to be done again.\n", last.UTC().Format(time.RFC3339))
	}
	switch {
	case len(wrong) > 0:
		return backfill.Errorf(backfill.Refused, "start nothing yet: %s, as said above", strings.Join(wrong, ", ")+" does not fit")
	case len(unseen) > 0:
		return backfill.Errorf(backfill.Refused, "cannot tell: %d sides were not looked at", len(unseen))
	}
	_, err = fmt.Fprintln(out, "yes: everything may be started")
	return err
}

func match(ctx context.Context, store *control.Store, site control.Site, name, dsn string) (string, error) {
	db, err := side.Open(ctx, site.Name, name, dsn)
	if err != nil {
		return "", err
	}
	defer db.Close()
	if site.OneDatabase {
		db.ShareDatabase()
	}
	return activities.Match(ctx, store, db)
}

func (c BackupCheck) list(ctx context.Context, store *control.Store, sites []control.Site, out io.Writer) error {
	where, size, err := store.Where(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "Back up the control database, %s (%s): with pg_dump, or with its cluster. It has the sites, requests, staged rows, the queue and history, accounts,\n"+
		"the audit, and the key that signs certificates.\n", where, size)
	fmt.Fprintln(out, "Back up each side's database as the application needs it, with the schema named here in it:")
	for _, site := range sites {
		for _, n := range site.Sides {
			fmt.Fprintf(out, "  %s/%s: schema %s\n", site.Name, n.Name, side.SchemaName(site.Name, n.Name))
		}
	}
	fmt.Fprintln(out, "Temporal needs no backup: what it has lost is started again from the control database.\n"+
		"After a restore, and before anything is started: backfill backup-check with --side SITE/SIDE=DSN for every side.")
	return nil
}
