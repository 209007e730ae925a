package main

import (
	"context"
	"fmt"
	"io"
	"time"
)

// devOptions stands in for dev.Options, and devRun for dev.Run.
type devOptions struct {
	State, Listen, Token, Control, Temporal, Site, From string

	Sides     map[string]string // name → DSN
	SideOrder []string
	Tables    []string
	Cycle     time.Duration
	Demo      bool
	Verbose   bool
}

func devRun(context.Context, devOptions, io.Writer) error { return todo("dev") }

func todo(command string) error { return fmt.Errorf("%s cannot be run yet", command) }
