package main

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// documents are the Markdown files of the project by path.
func documents(t *testing.T) map[string]string {
	out := map[string]string{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || slices.Contains([]string{"bin", "dist"}, path)):
			return filepath.SkipDir
		case strings.HasSuffix(path, ".md"):
			text, err := os.ReadFile(path)
			out[path] = string(text)
			return err
		}
		return nil
	}))
	require.NotEmpty(t, out)
	return out
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	fenced  = regexp.MustCompile("(?ms)^```[a-z]*\n(.*?)^```$")
	inline  = regexp.MustCompile("`([^`\n]+)`")
)

// anchors are the names that the headings of a document have, as GitHub makes them.
func anchors(text string) map[string]bool {
	out := map[string]bool{}
	for _, h := range heading.FindAllStringSubmatch(text, -1) {
		out[strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, strings.TrimSpace(h[1]))] = true
	}
	return out
}

// Every link of the documentation leads somewhere.
func TestDocumentedLinks(t *testing.T) {
	all := documents(t)
	for path, text := range all {
		for _, l := range link.FindAllStringSubmatch(text, -1) {
			target, anchor, _ := strings.Cut(l[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			file := path
			if target != "" {
				file = filepath.Join(filepath.Dir(path), target)
				_, err := os.Stat(file)
				require.NoError(t, err, "%s links to %s", path, l[1])
			}
			if anchor != "" {
				require.True(t, anchors(all[file])[anchor], "%s links to %s: there is no such heading", path, l[1])
			}
		}
	}
}

// code is what a document shows as code: whole blocks line by line, with lines that go on
// joined, and pieces within text.
func code(text string) (lines, pieces []string) {
	var block strings.Builder
	for _, f := range fenced.FindAllStringSubmatch(text, -1) {
		block.WriteString(f[1])
	}
	text = fenced.ReplaceAllString(text, "")
	listed := false
	for _, line := range strings.Split(text, "\n") {
		if line != "" && line[0] != ' ' {
			listed = regexp.MustCompile(`^(-|\d+\.) `).MatchString(line)
		}
		if strings.HasPrefix(line, "    ") && !listed {
			block.WriteString(line[4:] + "\n")
		} else {
			for _, m := range inline.FindAllStringSubmatch(line, -1) {
				pieces = append(pieces, m[1])
			}
		}
	}
	return strings.Split(strings.ReplaceAll(block.String(), "\\\n", " "), "\n"), pieces
}

// words splits a line as a shell does, roughly: quotes hold words together, and what
// comes after another command, a pipe, a redirection or a comment is left out.
func words(line string) (out []string) {
	var word strings.Builder
	quote, some := rune(0), false
	end := func() {
		if some {
			out = append(out, word.String())
		}
		word.Reset()
		some = false
	}
	for _, r := range line {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '\'' || r == '"':
			quote, some = r, true
		case r == ' ':
			end()
		case strings.ContainsRune(";|&>", r), r == '#' && !some:
			end()
			return out
		default:
			word.WriteRune(r)
			some = true
		}
	}
	end()
	return out
}

var (
	assignment  = regexp.MustCompile(`^[A-Z_]+=`)
	placeholder = regexp.MustCompile(`^[A-Z][A-Z_]*$`)
	numbers     = map[string]bool{"ID": true, "SEQ": true, "N": true}
)

// shown is what follows backfill on a line, nil when it is another program's.
func shown(line string) (args []string, ok bool) {
	w := words(line)
	for len(w) > 0 && assignment.MatchString(w[0]) {
		w = w[1:]
	}
	if len(w) == 0 || w[0] != "backfill" && w[0] != "bin/backfill" && w[0] != "./backfill" {
		return nil, false
	}
	for i := range w {
		if numbers[w[i]] || w[i] == "$id" {
			w[i] = "1"
		}
	}
	return w[1:], true
}

func parser(t *testing.T) *kong.Kong {
	k, err := kong.New(&grammar{}, append(options(), kong.Writers(io.Discard, io.Discard), kong.Exit(func(int) {}))...)
	require.NoError(t, err)
	return k
}

// Every command that the documentation shows is one: those in blocks as a whole, those
// within text as far as they go.
func TestDocumentedCommands(t *testing.T) {
	t.Setenv("BACKFILL_CONTROL", "postgres://x")
	t.Setenv("BACKFILL_DATABASE", "postgres://x")
	t.Setenv("BACKFILL_TEMPORAL", "temporal:7233")
	k := parser(t)
	whole := 0
	for path, text := range documents(t) {
		lines, pieces := code(text)
		for _, line := range lines {
			args, ok := shown(line)
			if !ok || strings.Contains(line, "…") || slices.Contains(args, "--help") {
				continue
			}
			whole++
			if i := slices.Index(args, "--config") + 1; i > 0 {
				args[i] = os.DevNull
			}
			_, err := parser(t).Parse(args)
			assert.NoError(t, err, "%s shows: %s", path, line)
		}
		for _, piece := range pieces {
			if args, ok := shown(piece); ok {
				known(t, k.Model.Node, path+" says "+piece, args)
			}
		}
	}
	require.Greater(t, whole, 30)
}

// known holds the words of a command that may be cut short to the grammar.
func known(t *testing.T, node *kong.Node, where string, args []string) {
	flags := map[string]bool{"help": true}
	add := func(n *kong.Node) {
		for _, f := range n.Flags {
			flags[f.Name] = true
			for _, alias := range f.Aliases {
				flags[alias] = true
			}
			if f.Tag.Negatable != "" {
				flags["no-"+f.Name] = true
			}
		}
		if n.DefaultCmd != nil {
			for _, f := range n.DefaultCmd.Flags {
				flags[f.Name] = true
			}
		}
	}
	add(node)
	for _, arg := range args {
		switch {
		case strings.HasPrefix(arg, "--"):
			name, _, _ := strings.Cut(arg[2:], "=")
			assert.True(t, flags[name], "%s: there is no --%s", where, name)
		case strings.HasPrefix(arg, "-"), placeholder.MatchString(arg):
		default:
			i := slices.IndexFunc(node.Children, func(n *kong.Node) bool { return n.Name == arg })
			if i < 0 {
				assert.True(t, len(node.Children) == 0 || node.DefaultCmd != nil, "%s: there is no command %s", where, arg)
				continue // a value
			}
			node = node.Children[i]
			add(node)
		}
	}
}

// Every address of the API that the documentation names is in the API's document.
func TestDocumentedRoutes(t *testing.T) {
	var document struct{ Paths map[string]map[string]any }
	raw, err := os.ReadFile("api/openapi.yaml")
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(raw, &document))
	parameter := regexp.MustCompile(`\\\{\w+\\\}`)
	named := regexp.MustCompile(`(?:(GET|POST|PUT|PATCH|DELETE) )?(?:https?://[\w.:$-]+|\$\w+|\$\{\w+\})?(/api/v1/[^\s"'?)…|]+)`)
	found := 0
	for path, text := range documents(t) {
		for _, m := range named.FindAllStringSubmatch(strings.ReplaceAll(text, "`", " "), -1) {
			address := strings.TrimRight(m[2], ".,:;/")
			some := false
			for p, methods := range document.Paths {
				shape := "^" + parameter.ReplaceAllString(regexp.QuoteMeta(p), "[^/]+") + "$"
				_, has := methods[strings.ToLower(m[1])]
				some = some || regexp.MustCompile(shape).MatchString(address) && (has || m[1] == "")
			}
			assert.True(t, some, "%s names %s %s, which is not in api/openapi.yaml", path, m[1], address)
			found++
		}
	}
	require.Greater(t, found, 5)
}

// Every target that the documentation has one make is one.
func TestDocumentedTargets(t *testing.T) {
	makefile, err := os.ReadFile("Makefile")
	require.NoError(t, err)
	for path, text := range documents(t) {
		lines, pieces := code(text)
		for _, line := range append(lines, pieces...) {
			w := words(line)
			for len(w) > 0 && assignment.MatchString(w[0]) {
				w = w[1:]
			}
			if len(w) < 2 || w[0] != "make" {
				continue
			}
			for _, target := range w[1:] {
				if !strings.Contains(target, "=") {
					require.Regexp(t, `(?m)^`+regexp.QuoteMeta(target)+`:`, string(makefile), "%s says: %s", path, line)
				}
			}
		}
	}
}
