package main

import (
	"fmt"

	"backfill/internal/dev"
)

type devOptions = dev.Options

var devRun = dev.Run

func todo(command string) error { return fmt.Errorf("%s cannot be run yet", command) }
