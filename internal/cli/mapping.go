package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"backfill/api/client"
	"backfill/internal/backfill"
)

// TableApply configures tables from a file.
type TableApply struct {
	Remote
	OneSite
	File string `short:"f" required:"" placeholder:"FILE" help:"The YAML file; - reads standard input."`
	Try  bool   `help:"Change nothing: check the mappings in the file against both sides, and show what they make of ten rows."`
}

func (c *TableApply) Help() string {
	return `Each table has the fields of backfill table set, and a mapping where the receiver's table has another shape: for its
columns the SQL expressions that make them, over the columns of the source. Columns of the same name need none.

    tables:
      - table: public.users
        captured_from: [old]
        mapping:
          target: public.users_v2
          columns:
            first_name: split_part(name, ' ', 1)
            email: lower(email)::public.citext
          drop: [legacy_flag]

A mapping is checked against both sides before anything is changed. Setting another one ends open requests of the
table, and offers a new backfill. mapping: {} removes it. Tables that the file does not name stay as they are.`
}

// tablesFile is a file of tables.
type tablesFile struct {
	Tables []map[string]any `yaml:"tables"`
	Rest   map[string]any   `yaml:",inline"`
}

func (c *TableApply) read() ([]map[string]any, error) {
	text, err := readFile(c.File)
	if err != nil {
		return nil, err
	}
	var file tablesFile
	if err := yaml.Unmarshal(text, &file); err != nil {
		return nil, usagef("%s: %v", c.File, err)
	}
	for name := range file.Rest {
		return nil, usagef("%s: %s is not known: a file of tables has a list named tables", c.File, name)
	}
	if len(file.Tables) == 0 {
		return nil, usagef("%s: it has no list named tables", c.File)
	}
	for i, t := range file.Tables {
		if name, ok := t["table"].(string); !ok || name == "" {
			return nil, usagef("%s: table %d of the list has no name: write table: schema.table", c.File, i+1)
		}
	}
	return file.Tables, nil
}

func (c *TableApply) Run(ctx context.Context, s *session) error {
	tables, err := c.read()
	if err != nil {
		return err
	}
	site, err := s.site(ctx, c.Site)
	if err != nil {
		return err
	}
	for _, t := range tables {
		name := t["table"].(string)
		if c.Try {
			err = c.try(ctx, s, site, name, t)
		} else {
			err = c.put(ctx, s, site, name, t)
		}
		if err != nil {
			return fmt.Errorf("table %s: %w", name, err)
		}
	}
	return nil
}

func (c *TableApply) put(ctx context.Context, s *session, site, name string, fields map[string]any) error {
	delete(fields, "table")
	var body client.PutTableJSONBody
	if err := fill(&body, fields); err != nil {
		return usagef("%v", err)
	}
	a, err := s.c.PutTable(ctx, site, name, body)
	if err != nil {
		return err
	}
	return answer(s, a, s.showTable)
}

func (c *TableApply) try(ctx context.Context, s *session, site, name string, t map[string]any) error {
	if t["mapping"] == nil {
		s.note.printf("table %s has no mapping to try\n", name)
		return nil
	}
	from, err := source(ctx, s, site, name, t)
	if err != nil {
		return err
	}
	body := client.TryMappingJSONBody{From: from}
	if err := fill(&body.Mapping, t["mapping"]); err != nil {
		return usagef("mapping: %v", err)
	}
	a, err := s.c.TryMapping(ctx, site, name, body)
	if err != nil {
		return err
	}
	return answer(s, a, func(x *client.TriedMapping) {
		s.out.printf("table %s: the mapping can be used; its key is (%s)\n", name, strings.Join(x.Key, ", "))
		for _, r := range x.Data {
			s.out.printf("  %s\n", line(r.Source))
			if r.Problem != nil {
				s.out.printf("    → nothing: %s\n", *r.Problem)
				continue
			}
			s.out.printf("    → %s\n", line(r.Result))
		}
		if len(x.Data) == 0 {
			s.note.printf("the source has no rows to try it on\n")
		}
	})
}

// source is the side from which a table of a file is captured.
func source(ctx context.Context, s *session, site, name string, t map[string]any) (string, error) {
	if given, ok := t["captured_from"].([]any); ok && len(given) == 1 {
		return fmt.Sprint(given[0]), nil
	}
	a, err := s.c.ListTables(ctx, site)
	if err != nil {
		return "", err
	}
	parsed, err := backfill.ParseTableName(name)
	if err != nil {
		return "", err
	}
	tables := a.Value.Data
	i := slices.IndexFunc(tables, func(x client.Panel) bool { return x.Table == parsed.String() })
	if i < 0 || len(tables[i].CapturedFrom) != 1 {
		return "", usagef("name the side whose changes are sent: captured_from: [SIDE]")
	}
	return tables[i].CapturedFrom[0], nil
}
