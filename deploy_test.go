package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// command is what a manifest has the program do.
type command struct {
	where string
	args  []string
	env   []string // names that it sets
	files []string // texts of the files of settings that it reads
}

// try parses a command as it will be parsed there.
func try(t *testing.T, c command) {
	t.Helper()
	set := map[string]string{"BACKFILL_CONTROL": "postgres://h/d", "BACKFILL_DATABASE": "postgres://h/d", "BACKFILL_TEMPORAL": "h:1"}
	for name := range set {
		require.NoError(t, os.Unsetenv(name))
	}
	for _, name := range c.env {
		if value, ok := set[name]; ok {
			t.Setenv(name, value)
		}
	}
	args := slices.Clone(c.args)
	for _, text := range c.files {
		path := filepath.Join(t.TempDir(), "settings.yaml")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		args = append(args, "--config="+path)
	}
	parser, err := kong.New(&grammar{}, append(options(), kong.Writers(io.Discard, io.Discard), kong.Exit(func(int) { t.Fatal("it asks for help") }))...)
	require.NoError(t, err)
	_, err = parser.Parse(args)
	require.NoError(t, err, "%s: backfill %s", c.where, strings.Join(c.args, " "))
	known := map[string]bool{"BACKFILL_CONFIG": true}
	for _, s := range settings(t) {
		known[s.Env] = true
	}
	for _, name := range c.env {
		require.True(t, known[name] || !strings.HasPrefix(name, "BACKFILL_"), "%s: no setting has the variable %s", c.where, name)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

func TestComposeRunsCommandsThatExist(t *testing.T) {
	// Substitutions take their defaults, and those that must be set a value.
	text := regexp.MustCompile(`\$\{\w+:?[-?]?([^}]*)\}`).ReplaceAllString(read(t, "deploy/compose.yaml"), "$1")
	var file struct {
		Services map[string]struct {
			Image       string
			Command     []string
			Environment map[string]string
			Volumes     []string
			ReadOnly    bool     `yaml:"read_only"`
			CapDrop     []string `yaml:"cap_drop"`
		}
	}
	require.NoError(t, yaml.Unmarshal([]byte(text), &file))
	ours := 0
	for name, s := range file.Services {
		for _, v := range s.Volumes {
			if path, _, _ := strings.Cut(v, ":"); strings.HasPrefix(path, ".") {
				require.FileExists(t, strings.TrimSuffix(filepath.Join("deploy", path), "/grafana")+map[bool]string{true: "/grafana/backfill.json"}[strings.HasSuffix(path, "/grafana")], name)
			}
		}
		if s.Image != "backfill" {
			continue
		}
		ours++
		require.True(t, s.ReadOnly && slices.Equal(s.CapDrop, []string{"ALL"}), name)
		c := command{where: "compose: " + name, args: s.Command}
		for variable := range s.Environment {
			c.env = append(c.env, variable)
		}
		try(t, c)
	}
	require.Equal(t, 5, ours, "migrate, api, control and two agents")

	compose, err := exec.LookPath("docker-compose")
	if err != nil {
		t.Log("docker-compose is not here: that it takes the file was not looked at")
		return
	}
	out, err := exec.Command(compose, "-f", "deploy/compose.yaml", "--env-file", "deploy/compose/example.env", "--profile", "demo", "config", "-q").CombinedOutput()
	require.NoError(t, err, string(out))
}

func TestKubernetesRunsCommandsThatExist(t *testing.T) {
	type probe struct {
		HTTPGet struct{ Path, Port string } `yaml:"httpGet"`
	}
	type container struct {
		Image string
		Args  []string
		Env   []struct {
			Name      string
			ValueFrom struct {
				SecretKeyRef struct{ Name, Key string } `yaml:"secretKeyRef"`
			} `yaml:"valueFrom"`
		}
		Ports []struct {
			ContainerPort int `yaml:"containerPort"`
		}
		SecurityContext struct {
			AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
			ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		} `yaml:"securityContext"`
		ReadinessProbe probe `yaml:"readinessProbe"`
		LivenessProbe  probe `yaml:"livenessProbe"`
	}
	type object struct {
		Kind     string
		Metadata struct{ Name string }
		Data     map[string]string
		Secret   map[string]string `yaml:"stringData"`
		Spec     struct {
			Template struct {
				Spec struct {
					SecurityContext struct {
						RunAsNonRoot bool `yaml:"runAsNonRoot"`
					} `yaml:"securityContext"`
					Containers []container
				}
			}
		}
	}
	var kustomization struct{ Resources []string }
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "deploy/kubernetes/kustomization.yaml")), &kustomization))
	files, err := filepath.Glob("deploy/kubernetes/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, len(kustomization.Resources)+1, "each file is a resource")

	var all []object
	secrets, budgets, settings := map[string]bool{}, map[string]bool{}, ""
	for _, name := range kustomization.Resources {
		decoder := yaml.NewDecoder(strings.NewReader(read(t, filepath.Join("deploy/kubernetes", name))))
		for {
			var o object
			if err := decoder.Decode(&o); err == io.EOF {
				break
			} else {
				require.NoError(t, err, name)
			}
			all = append(all, o)
			for key := range o.Secret {
				secrets[o.Metadata.Name+"/"+key] = true
			}
			budgets[o.Metadata.Name] = budgets[o.Metadata.Name] || o.Kind == "PodDisruptionBudget"
			settings += o.Data["backfill.yaml"]
		}
	}
	ran := 0
	for _, o := range all {
		for _, c := range o.Spec.Template.Spec.Containers {
			ran++
			where := "kubernetes: " + o.Metadata.Name
			run := command{where: where, args: c.Args, files: []string{settings}}
			for _, e := range c.Env {
				run.env = append(run.env, e.Name)
				if from := e.ValueFrom.SecretKeyRef; from.Name != "" {
					require.True(t, secrets[from.Name+"/"+from.Key], "%s: no secret %s with %s", where, from.Name, from.Key)
				}
			}
			try(t, run)
			require.True(t, o.Spec.Template.Spec.SecurityContext.RunAsNonRoot && c.SecurityContext.ReadOnlyRootFilesystem && c.SecurityContext.AllowPrivilegeEscalation != nil, where)
			if o.Kind == "Deployment" {
				require.Equal(t, "/readyz", c.ReadinessProbe.HTTPGet.Path, where)
				require.Equal(t, "/healthz", c.LivenessProbe.HTTPGet.Path, where)
				require.True(t, budgets[o.Metadata.Name], "%s has no disruption budget", where)
				require.Contains(t, settings, fmt.Sprintf("0.0.0.0:%d", c.Ports[0].ContainerPort), where)
			}
		}
	}
	require.Equal(t, 4, ran, "migrate, api, control and an agent")
}

func TestSystemdUnitsRunCommandsThatExist(t *testing.T) {
	units, err := filepath.Glob("deploy/systemd/*.service")
	require.NoError(t, err)
	require.Len(t, units, 4)
	dir := t.TempDir()
	for _, path := range units {
		text := read(t, path)
		line := regexp.MustCompile(`(?m)^ExecStart=/usr/local/bin/backfill (.*)$`).FindStringSubmatch(text)
		require.NotNil(t, line, path)
		require.Contains(t, text, "BACKFILL_CONFIG=%d/settings.yaml,%d/secrets.yaml", path)
		try(t, command{where: path, args: strings.Fields(strings.ReplaceAll(line[1], "%I", "demo/a")),
			files: []string{"temporal: h:1\n", "control: postgres://h/d\ndatabase: postgres://h/d\n"}})
		// systemd wants the program to be there.
		text = strings.ReplaceAll(text, "/usr/local/bin/backfill ", "/bin/true ")
		require.NoError(t, os.WriteFile(filepath.Join(dir, filepath.Base(path)), []byte(text), 0o600))
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("systemd-analyze is not here: that it takes the units was not looked at")
		return
	}
	copies, err := filepath.Glob(filepath.Join(dir, "*.service"))
	require.NoError(t, err)
	out, err := exec.Command(analyze, append([]string{"verify"}, copies...)...).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Empty(t, string(bytes.TrimSpace(out)))
}
