package serve

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

const elasticsearchVersion = "8.19.21"

const elasticsearchPOM = `<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>tidemark</groupId>
  <artifactId>elasticsearch-home</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.elasticsearch</groupId>
      <artifactId>elasticsearch</artifactId>
      <version>` + elasticsearchVersion + `</version>
    </dependency>
    <dependency>
      <groupId>org.elasticsearch.plugin</groupId>
      <artifactId>transport-netty4</artifactId>
      <version>` + elasticsearchVersion + `</version>
    </dependency>
  </dependencies>
</project>
`

const nettyDescriptor = `name=transport-netty4
description=HTTP and transport by Netty 4
version=` + elasticsearchVersion + `
elasticsearch.version=` + elasticsearchVersion + `
java.version=17
classname=org.elasticsearch.transport.netty4.Netty4Plugin
`

const logging = `status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d{ISO8601}][%-5p][%c{1.}] %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
`

// elasticsearchSums are the SHA-256 of every jar, as sha256sum prints them.
//
//go:embed elasticsearch.sha256
var elasticsearchSums string

//go:embed Launcher.java
var launcher string

// fetchElasticsearch prepares a home folder: Elasticsearch's jars, as published for Maven, with the one module that
// gives it HTTP, and the compiled launcher in classes.
func fetchElasticsearch(ctx context.Context) (home, java string, err error) {
	if runtime.GOOS != "linux" {
		return "", "", errors.New("a native Elasticsearch needs Linux: start Docker or set ELASTICSEARCH_URL")
	}
	if java, err = findOrInstall(ctx, "java", "default-jdk-headless"); err != nil {
		return "", "", err
	}
	home, err = prepared(ctx, "elasticsearch-"+elasticsearchVersion, buildElasticsearch)
	return home, java, err
}

func findOrInstall(ctx context.Context, program, pkg string) (string, error) {
	if path, err := exec.LookPath(program); err == nil {
		return path, nil
	}
	if err := installDebian(ctx, pkg); err != nil {
		return "", err
	}
	return exec.LookPath(program)
}

func buildElasticsearch(ctx context.Context, home string) error {
	javac, err := findOrInstall(ctx, "javac", "default-jdk-headless")
	if err != nil {
		return err
	}
	mvn, err := findOrInstall(ctx, "mvn", "maven")
	if err != nil {
		return err
	}
	announce("downloading Elasticsearch " + elasticsearchVersion)
	lib, module := filepath.Join(home, "lib"), filepath.Join(home, "modules", "transport-netty4")
	for path, text := range map[string]string{
		filepath.Join(home, "pom.xml"):                        elasticsearchPOM,
		filepath.Join(home, "Launcher.java"):                  launcher,
		filepath.Join(home, "config", "log4j2.properties"):    logging,
		filepath.Join(module, "plugin-descriptor.properties"): nettyDescriptor,
	} {
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644))
		if err != nil {
			return err
		}
	}
	if _, err := run(ctx, home, nil, mvn, "-B", "-q",
		"org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies",
		"-DincludeScope=runtime", "-DoutputDirectory="+lib); err != nil {
		return err
	}
	if err := checkJars(lib); err != nil {
		return err
	}
	for _, pattern := range []string{"transport-netty4-*.jar", "netty-*.jar"} {
		jars, _ := filepath.Glob(filepath.Join(lib, pattern))
		for _, jar := range jars {
			if err := os.Rename(jar, filepath.Join(module, filepath.Base(jar))); err != nil {
				return err
			}
		}
	}
	_, err = run(ctx, home, nil, javac, "--module-path", lib, "--add-modules=ALL-MODULE-PATH",
		"-d", filepath.Join(home, "classes"), filepath.Join(home, "Launcher.java"))
	return err
}

// checkJars demands exactly the jars of elasticsearchSums.
func checkJars(lib string) error {
	count := 0
	for line := range strings.Lines(elasticsearchSums) {
		fields := strings.Fields(line)
		if err := checkSum(filepath.Join(lib, fields[1]), fields[0]); err != nil {
			return err
		}
		count++
	}
	entries, err := os.ReadDir(lib)
	if err == nil && len(entries) != count {
		err = fmt.Errorf("maven brought %d jars, expected %d: it is not what was pinned, so it is not used", len(entries), count)
	}
	return err
}
