package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

const bucardoCopy, bucardoDelta = "Bucardo, initial copy", "Bucardo, its triggers' delta of as many rows"

// bucardo measures Bucardo on a copy of a workload's tables, which its triggers then burden alone: first the copy of all rows,
// then as many rows updated on the source.
func (b *bench) bucardo(ctx context.Context, w workload, group string) (err error) {
	program, err := exec.LookPath("bucardo")
	if err != nil {
		return missing("not installed (Debian: apt-get install bucardo postgresql-plperl)")
	}
	var perl bool
	if err := b.receiver.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'plperlu')`).Scan(&perl); err != nil {
		return err
	}
	if !perl {
		return missing("PL/Perl is not installed (Debian: apt-get install postgresql-plperl)")
	}
	c := w
	c.name = "bucardo_" + w.name
	if err := errors.Join(b.source.exec(ctx, c.create(), fmt.Sprintf("INSERT INTO %s SELECT * FROM %s ORDER BY %s", c.name, w.name, w.keys()), "VACUUM ANALYZE "+c.name),
		b.receiver.exec(ctx, c.create())); err != nil {
		return err
	}
	dir := filepath.Join(b.dir, "bucardo")
	defer func() {
		// What it has installed in the databases goes too.
		ctx := context.WithoutCancel(ctx)
		for _, db := range []*database{b.source, b.receiver} {
			err = errors.Join(err, db.exec(ctx, "DROP TABLE "+c.name, "DROP SCHEMA IF EXISTS bucardo CASCADE"))
		}
		err = errors.Join(err, b.receiver.exec(ctx, "DROP DATABASE IF EXISTS bucardo WITH (FORCE)", "DROP ROLE IF EXISTS bucardo"), os.RemoveAll(dir))
	}()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	at, err := url.Parse(b.receiver.dsn)
	if err != nil {
		return err
	}
	password, _ := at.User.Password()
	do := func(args ...string) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, program, append(args, "--dbhost", at.Hostname(), "--dbport", at.Port(), "--dbuser", "postgres", "--dbpass", password,
			"--piddir", dir, "--log-destination", dir, "--quiet")...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "PGPASSWORD="+password)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("bucardo %s: %w: %.1000s", args[0], err, out)
		}
		return nil
	}
	// It would make this role itself, with a password that it puts into ~/.pgpass.
	if err := b.receiver.exec(ctx, "CREATE ROLE bucardo SUPERUSER LOGIN PASSWORD '"+password+"'"); err != nil {
		return err
	}
	if err := do("install", "--batch", "--dbname", "postgres"); err != nil {
		return err
	}
	for name, db := range map[string]*database{source: b.source, receiver: b.receiver} {
		at, err := url.Parse(db.dsn)
		if err != nil {
			return err
		}
		password, _ := at.User.Password()
		if err := do("add", "db", name, "dbname="+name, "host="+at.Hostname(), "port="+at.Port(), "user=postgres", "pass="+password, "--dbname", "bucardo"); err != nil {
			return err
		}
	}
	if err := do("add", "sync", "bench", "tables=public."+c.name, "dbs="+source+":source,"+receiver+":target", "onetimecopy=1", "autokick=0", "--dbname", "bucardo"); err != nil {
		return err
	}
	if err := b.settle(ctx); err != nil {
		return err
	}
	if err := do("start", "measure", "--dbname", "bucardo"); err != nil {
		return err
	}
	defer func() { err = errors.Join(do("stop", "measured", "--dbname", "bucardo"), err) }()
	// A kick that comes before the process that is to do the work is lost.
	ready := func() error {
		return await(ctx, "Bucardo to be at work", func() (bool, error) {
			log, err := os.ReadFile(filepath.Join(dir, "log.bucardo"))
			if errors.Is(err, fs.ErrNotExist) {
				return false, nil
			}
			return bytes.Count(log, []byte("New kid")) > bytes.Count(log, []byte("exiting at cleanup_kid")), err
		})
	}
	kick := func(name string) error {
		if err := ready(); err != nil {
			return err
		}
		began := time.Now()
		if err := do("kick", "bench", "0", "--notimer", "--dbname", "bucardo"); err != nil {
			return err
		}
		b.report.took(group, name, time.Since(began))
		b.say("%s, %s: %.2f s", group, name, time.Since(began).Seconds())
		return b.arrived(ctx, c)
	}
	if err := kick(bucardoCopy); err != nil {
		return err
	}
	if err := errors.Join(b.source.exec(ctx, fmt.Sprintf("UPDATE %s SET %s = %[2]s", c.name, c.stale)), b.settle(ctx)); err != nil {
		return err
	}
	return kick(bucardoDelta)
}
