package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/alecthomas/kong"
	"go.yaml.in/yaml/v3"
)

// A setting is a flag that the environment and files may give as well: --public-url,
// BACKFILL_PUBLIC_URL and public-url. What the command line gives wins, then the
// environment, then the last file that names it, then the default.
//
// The name in files is made from that in the environment, so that one file serves
// commands that give one thing different flags.

const envPrefix = "BACKFILL_"

// EveryFlagIsASetting has every flag of these commands read from the environment and
// from files, but for those with `env:"-"`.
func EveryFlagIsASetting(commands ...string) kong.Option {
	return kong.PostBuild(func(k *kong.Kong) error {
		for _, n := range k.Model.Children {
			if !slices.Contains(commands, n.Name) {
				continue
			}
			for _, f := range n.Flags {
				switch {
				case len(f.Envs) == 1 && f.Envs[0] == "-":
					f.Envs, f.Tag.Envs = nil, nil
				case len(f.Envs) == 0 && f.Name != "help":
					f.Envs = []string{envPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))}
					f.Tag.Envs = f.Envs
				}
			}
		}
		return nil
	})
}

// settingName is what files call a flag, "" when it is no setting.
func settingName(f *kong.Flag) string {
	if len(f.Envs) == 0 || f.Name == "config" {
		return ""
	}
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(f.Envs[0], envPrefix), "_", "-"))
}

// settingFlags are the flags of all commands by what files call them.
func settingFlags(app *kong.Application) map[string][]*kong.Flag {
	all := map[string][]*kong.Flag{}
	_ = kong.Visit(app, func(v kong.Visitable, next kong.Next) error {
		if f, ok := v.(*kong.Flag); ok {
			if name := settingName(f); name != "" {
				all[name] = append(all[name], f)
			}
		}
		return next(nil)
	})
	return all
}

// ConfigFiles is the flag that names files of settings.
type ConfigFiles []string

// BeforeResolve reads the files and has kong ask them for what was not given.
func (ConfigFiles) BeforeResolve(k *kong.Kong, ctx *kong.Context, trace *kong.Path) error {
	files, err := readConfig(k.Model, ctx.FlagValue(trace.Flag).(ConfigFiles))
	if err != nil {
		return err
	}
	ctx.AddResolver(files)
	return nil
}

// configured is what files say, by name.
type configured map[string]configuredValue

type configuredValue struct {
	value any    // a string, or a list of strings
	from  string // file:line
}

// readConfig reads files, later ones over earlier ones. A name that no command knows
// and a value that one of those that know it cannot take are errors.
func readConfig(app *kong.Application, paths []string) (configured, error) {
	known, all := settingFlags(app), configured{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, usagef("--config: %v", err)
		}
		var doc yaml.Node
		if err := yaml.Unmarshal(text, &doc); err != nil {
			return nil, usagef("%s: %s", path, strings.TrimPrefix(err.Error(), "yaml: "))
		}
		if len(doc.Content) == 0 {
			continue // empty
		}
		top := doc.Content[0]
		if top.Kind != yaml.MappingNode {
			return nil, usagef("%s:%d: write settings as NAME: VALUE, one a line", path, top.Line)
		}
		here := map[string]bool{}
		for i := 0; i < len(top.Content); i += 2 {
			name, value := top.Content[i].Value, top.Content[i+1]
			from := fmt.Sprintf("%s:%d", path, top.Content[i].Line)
			flags, ok := known[name]
			switch {
			case !ok:
				return nil, usagef("%s: no setting is called %q%s", from, name, nearest(name, known))
			case here[name]:
				return nil, usagef("%s: %s is there twice", from, name)
			}
			here[name] = true
			v, err := commandLineValue(value)
			if err != nil {
				return nil, usagef("%s: %s: %v", from, name, err)
			}
			for _, f := range flags {
				if err := takes(f, v); err != nil {
					return nil, usagef("%s: %s", from, unquoted(err, f))
				}
			}
			all[name] = configuredValue{v, from}
		}
	}
	return all, nil
}

// commandLineValue is a YAML value as kong takes it: a string, or a list of strings for
// a flag that may be repeated.
func commandLineValue(n *yaml.Node) (any, error) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch {
	case n.Kind == yaml.ScalarNode && n.Tag != "!!null":
		return n.Value, nil
	case n.Kind == yaml.SequenceNode:
		list := []any{}
		for _, item := range n.Content {
			text, err := commandLineValue(item)
			if _, ok := text.(string); err != nil || !ok {
				return nil, errors.New("a list holds plain values")
			}
			list = append(list, text)
		}
		return list, nil
	}
	return nil, errors.New("give a value, or leave the name out")
}

// takes says whether a flag can have a value, and leaves the flag alone.
func takes(f *kong.Flag, value any) error {
	defer func(set bool) { f.Set = set }(f.Set)
	if _, list := value.([]any); list && !f.IsSlice() {
		return fmt.Errorf("--%s: it takes one value, not a list", f.Name)
	}
	return f.Parse(kong.Scan().PushTyped(value, kong.FlagValueToken), reflect.New(f.Target.Type()).Elem())
}

// unquoted is the error of a value without the value of a secret in it.
func unquoted(err error, f *kong.Flag) string {
	if isSecret(f) {
		return "--" + f.Name + " cannot have this value"
	}
	return err.Error()
}

// nearest suggests the name that begins or ends like an unknown one.
func nearest(name string, known map[string][]*kong.Flag) string {
	flat := strings.NewReplacer("-", "", "_", "")
	for k := range known {
		if strings.EqualFold(flat.Replace(k), flat.Replace(name)) {
			return ": write " + k
		}
	}
	return ": backfill config names lists them"
}

// Validate is kong's; what there is to check was checked when the files were read.
func (configured) Validate(*kong.Application) error { return nil }

// Resolve gives kong what the command line and the environment left out.
func (c configured) Resolve(_ *kong.Context, _ *kong.Path, f *kong.Flag) (any, error) {
	if v, ok := c[settingName(f)]; ok && fromEnv(f) == "" {
		return v.value, nil
	}
	return nil, nil
}

// fromEnv is the variable that gives a flag, "" when none does.
func fromEnv(f *kong.Flag) string {
	for _, name := range f.Envs {
		if _, ok := os.LookupEnv(name); ok {
			return name
		}
	}
	return ""
}

// isSecret says whether a setting may not be shown. Of connection strings only the
// password is hidden.
func isSecret(f *kong.Flag) bool { return f.Tag.Has("secret") || strings.HasSuffix(f.Name, "-secret") }

// ConfigCmd has the commands about settings.
type ConfigCmd struct {
	Check ConfigCheck `cmd:"" group:"commands" help:"Check files and environment, and the command line of a command, without running it."`
	Print ConfigPrint `cmd:"" group:"commands" help:"Print the settings a command would run with, and where each comes from. Secrets are left out."`
	Names ConfigNames `cmd:"" group:"commands" help:"List the settings: their names in files and in the environment, and their defaults."`
}

// ofCommand is a command line that is looked at and not run.
type ofCommand struct {
	Command []string `arg:"" optional:"" passthrough:"" placeholder:"COMMAND" help:"A command with its flags, such as: worker --control."`
}

// parse looks at the command line as if it were to be run, with the same files.
func (c *ofCommand) parse(k *kong.Context) (*kong.Context, error) {
	command := slices.Clone(c.Command)
	var files ConfigFiles
	for _, f := range k.Model.Flags {
		if f.Name == "config" {
			files = k.FlagValue(f).(ConfigFiles)
		}
	}
	for _, f := range slices.Backward(files) {
		command = slices.Insert(command, 0, "--config="+f)
	}
	return k.Kong.Parse(command)
}

// ConfigCheck checks settings.
type ConfigCheck struct{ ofCommand }

func (c *ConfigCheck) Run(k *kong.Context, out io.Writer) error {
	known := settingFlags(k.Model)
	for _, name := range sortedNames(known) {
		for _, f := range known[name] {
			if env := fromEnv(f); env != "" {
				if err := takes(f, os.Getenv(env)); err != nil {
					return usagef("%s: %s", env, unquoted(err, f))
				}
			}
		}
	}
	what := "files and environment"
	if len(c.Command) > 0 {
		what = strings.Join(c.Command[:1], " ")
		if _, err := c.parse(k); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(out, "%s: no mistake found\n", what)
	return err
}

// ConfigPrint prints settings.
type ConfigPrint struct{ ofCommand }

func (c *ConfigPrint) Run(k *kong.Context, out io.Writer) error {
	if len(c.Command) == 0 {
		return usagef("say of which command, such as: backfill config print api")
	}
	parsed, err := c.parse(k)
	if err != nil {
		return err
	}
	var files configured
	for _, f := range parsed.Model.Flags {
		if f.Name == "config" {
			if files, err = readConfig(parsed.Model, parsed.FlagValue(f).(ConfigFiles)); err != nil {
				return err
			}
		}
	}
	given := map[*kong.Flag]bool{}
	for _, p := range parsed.Path {
		if p.Flag != nil && !p.Resolved {
			given[p.Flag] = true
		}
	}
	for _, f := range parsed.Flags() {
		name := settingName(f)
		if name == "" {
			continue
		}
		from, env := "default", fromEnv(f)
		switch v, ok := files[name]; {
		case given[f]:
			from = "command line"
		case env != "":
			from = env
		case ok:
			from = v.from
		}
		if from == "default" && !f.HasDefault {
			fmt.Fprintf(out, "# %s: not set\n", name)
			continue
		}
		fmt.Fprintf(out, "%s: %s # %s\n", name, shown(f, parsed.FlagValue(f)), from)
	}
	return nil
}

// shown is a value as a file may have it, without its secrets.
func shown(f *kong.Flag, value any) string {
	if isSecret(f) {
		return `"…"`
	}
	switch v := reflect.ValueOf(value); v.Kind() {
	case reflect.Slice:
		list := make([]string, v.Len())
		for i := range list {
			list[i] = fmt.Sprint(v.Index(i))
		}
		line, err := json.Marshal(list) // which is YAML, too
		if err != nil {
			return "…"
		}
		return redact(string(line))
	case reflect.Bool, reflect.Int, reflect.Int64:
		return fmt.Sprint(value)
	}
	line, err := yaml.Marshal(redact(fmt.Sprint(value)))
	if err != nil {
		return "…"
	}
	return strings.TrimSpace(string(line))
}

// ConfigNames lists the settings.
type ConfigNames struct{}

func (ConfigNames) Run(k *kong.Context, out io.Writer) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SETTING\tENVIRONMENT\tDEFAULT\tCOMMANDS")
	for _, x := range Settings(k.Model) {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", x.Name, x.Env, cmp.Or(x.Default, "–"), strings.Join(x.Commands, ", "))
	}
	return t.Flush()
}

// Setting is what can be said of one.
type Setting struct {
	Name, Env, Flag, Default, Help string
	Commands                       []string
}

// Settings describes all settings by name.
func Settings(app *kong.Application) (all []Setting) {
	at := map[string]int{}
	var visit func(n *kong.Node, path string)
	visit = func(n *kong.Node, command string) {
		for _, f := range n.Flags {
			path := command
			name := settingName(f)
			if name == "" {
				continue
			}
			i, ok := at[name]
			if !ok {
				i = len(all)
				at[name] = i
				all = append(all, Setting{Name: name, Env: f.Envs[0], Flag: "--" + f.Name})
			}
			// Another command's rather than backfill dev's, which has defaults of its own.
			if only := all[i].Commands; len(only) == 0 || len(only) == 1 && only[0] == "dev" {
				all[i].Default, all[i].Help = f.Default, f.Help
			}
			if flag := "--" + f.Name; !strings.Contains(all[i].Flag, flag) {
				all[i].Flag += ", " + flag
			}
			if f.Group != nil && f.Group.Key == "api" {
				path = "those that use the API"
			}
			if !slices.Contains(all[i].Commands, path) {
				all[i].Commands = append(all[i].Commands, path)
			}
		}
		for _, child := range n.Children {
			visit(child, strings.TrimSpace(command+" "+child.Name))
		}
	}
	visit(app.Node, "")
	slices.SortFunc(all, func(a, b Setting) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func sortedNames(m map[string][]*kong.Flag) (names []string) {
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
