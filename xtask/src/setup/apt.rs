//! apt and dpkg, driven without questions.
//!
//! Every call waits for other users of the package database up to a deadline, and every failure has the tool's
//! message and the remedy. Lists that are absent or out of date are fetched once.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::sources::{self, BACKPORTS, CODENAME, Format, Found};
use crate::command::{last_lines, output, shown};

/// Maximum time that another apt or dpkg may hold its lock.
const LOCK_WAIT: Duration = Duration::from_secs(300);
const SOURCES: &str = "/etc/apt/sources.list";
const SOURCES_DIRECTORY: &str = "/etc/apt/sources.list.d";

/// The versions of `packages` that are installed, in their order; `None` where one is not.
pub(crate) fn installed(packages: &[&str]) -> Result<Vec<Option<String>>> {
    let format = "-f=${db:Status-Status} ${Package} ${Version}\n";
    let query = Command::new("dpkg-query")
        .args(["-W", format])
        .args(packages)
        .stdin(Stdio::null())
        .output()
        .context("dpkg-query cannot be started: the set-up knows Debian 12 and 13")?;
    let said = String::from_utf8_lossy(&query.stdout);
    let version_of = |package: &&str| {
        said.lines().find_map(|line| {
            let mut words = line.split(' ');
            let here = words.next() == Some("installed") && words.next() == Some(package);
            here.then(|| words.next().unwrap_or_default().to_owned())
        })
    };
    Ok(packages.iter().map(version_of).collect())
}

/// Puts the backports suite beside the Debian that is configured, unless it is there. True if a file was written.
pub(crate) fn add_backports() -> Result<bool> {
    let mut debian = None;
    for (content, format) in source_files() {
        match sources::read(&content, format) {
            Found::Backports => return Ok(false),
            Found::Debian(made) => debian = debian.or(Some(made)),
            Found::Nothing => {}
        }
    }
    let Some(made) = debian else {
        bail!(
            "no source in {SOURCES} or {SOURCES_DIRECTORY} brings `{CODENAME} main`, so {BACKPORTS} cannot be put \
             beside it; add a Debian 12 source or the {BACKPORTS} suite by hand and run `cargo xtask setup` again"
        );
    };
    let path = Path::new(SOURCES_DIRECTORY).join(made.name);
    std::fs::write(&path, made.content).with_context(|| format!("{} cannot be written", path.display()))?;
    println!("setup: added {BACKPORTS} in {}", path.display());
    Ok(true)
}

/// The files that tell this machine's apt where to get packages: their content and format.
pub(super) fn source_files() -> Vec<(String, Format)> {
    let mut files = vec![Path::new(SOURCES).to_path_buf()];
    if let Ok(entries) = std::fs::read_dir(SOURCES_DIRECTORY) {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    let content = |file: std::path::PathBuf| {
        let format = match file.extension()?.to_str()? {
            "sources" => Format::Stanzas,
            "list" => Format::Lines,
            _ => return None,
        };
        Some((std::fs::read_to_string(&file).ok()?, format))
    };
    files.into_iter().filter_map(content).collect()
}

/// Fetches the lists of packages.
pub(crate) fn update() -> Result<()> {
    println!("setup: fetching the lists of packages");
    apt_get(&["update"], None).context("the lists of packages cannot be fetched").map(drop)
}

/// Installs packages from the release, or from the suite given.
pub(crate) fn install(packages: &[&str], suite: Option<&str>) -> Result<()> {
    println!("setup: installing {}", packages.join(" "));
    let mut arguments = vec!["install", "--no-install-recommends"];
    arguments.extend(suite.iter().flat_map(|suite| ["-t", suite]));
    arguments.extend(packages);
    let first = apt_get(&arguments, None);
    if first.is_ok() {
        return Ok(());
    }
    // Lists older than the mirror name files that are gone from it.
    update()?;
    apt_get(&arguments, None).with_context(|| format!("{} cannot be installed", packages.join(" "))).map(drop)
}

/// Installs those that are missing.
pub(crate) fn require(packages: &[&str]) -> Result<()> {
    let found = installed(packages)?;
    let missing = packages.iter().zip(found).filter(|(_, version)| version.is_none());
    let missing: Vec<&str> = missing.map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    require_root(&missing)?;
    install(&missing, None)
}

/// Downloads `package=version` archives into `directory`. Needs no root when the lists are there.
pub(crate) fn download(packages: &[String], directory: &Path) -> Result<()> {
    println!("setup: downloading {}", packages.join(" "));
    let mut arguments = vec!["download"];
    arguments.extend(packages.iter().map(String::as_str));
    apt_get(&arguments, Some(directory))
        .with_context(|| format!("{} cannot be downloaded", packages.join(" ")))
        .map(drop)
}

/// Versions of a package that apt knows, newest first.
pub(crate) fn versions(package: &str) -> Result<Vec<String>> {
    let table = output(Command::new("apt-cache").args(["madison", package]))?;
    let mut versions: Vec<String> = Vec::new();
    for (version, _) in madison(&table, package) {
        if !versions.contains(&version) {
            versions.push(version);
        }
    }
    Ok(versions)
}

/// Versions and suites of the package's binary entries in a table of `apt-cache madison`.
pub(super) fn madison(table: &str, package: &str) -> Vec<(String, String)> {
    let entry = |line: &str| {
        let mut columns = line.split('|').map(str::trim);
        let (name, version, origin) = (columns.next()?, columns.next()?, columns.next()?);
        let suite = origin.split(' ').nth(1)?.split('/').next()?;
        let fits = name == package && origin.ends_with("Packages");
        fits.then(|| (version.to_owned(), suite.to_owned()))
    };
    table.lines().filter_map(entry).collect()
}

/// The version that apt would install.
pub(crate) fn candidate(package: &str) -> Result<Option<String>> {
    let policy = output(Command::new("apt-cache").args(["policy", package]))?;
    let line = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    Ok(line.filter(|version| *version != "(none)").map(str::to_owned))
}

/// The packages that `package=version` depends on (first alternatives only).
pub(crate) fn depends(package_and_version: &str) -> Result<Vec<String>> {
    let record = output(Command::new("apt-cache").args(["show", package_and_version]))?;
    let field = record.lines().find_map(|line| line.strip_prefix("Depends: ")).unwrap_or_default();
    let name = |entry: &str| {
        entry.split_whitespace().next().map(|name| name.split(':').next().unwrap_or(name).to_owned())
    };
    Ok(field.split(',').filter_map(name).collect())
}

/// Runs apt-get, which waits for others; what it wrote to its standard output.
pub(super) fn apt_get(arguments: &[&str], directory: Option<&Path>) -> Result<String> {
    let started = Instant::now();
    loop {
        let mut command = Command::new("apt-get");
        command
            .args(["-qy", "-o", "DPkg::Lock::Timeout=60", "-o", "Acquire::Retries=3"])
            .args(["-o", "Acquire::http::Timeout=30", "-o", "APT::Sandbox::User=root"])
            .args(arguments)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        command.current_dir(directory.unwrap_or(Path::new("/")));
        let output =
            command.output().context("apt-get cannot be started: the set-up knows Debian 12 and 13")?;
        // `update` exits with 0 when only some lists came; what needs them fails later, and by name.
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let locked =
            said.contains("Could not get lock") || said.contains("Unable to acquire the dpkg frontend lock");
        if !locked {
            bail!(
                "`{}` failed with {}:\n{}\nway out: see that this machine reaches its Debian mirror and that \
                 `dpkg --audit` is silent, then run `cargo xtask setup` again",
                shown(&command),
                output.status,
                last_lines(&said, 12)
            );
        }
        if started.elapsed() > LOCK_WAIT {
            bail!(
                "another program has held the package database for {} s: {}\nway out: let it finish, then run \
                 `cargo xtask setup` again",
                started.elapsed().as_secs(),
                last_lines(&said, 3)
            );
        }
        std::thread::sleep(Duration::from_secs(2));
    }
}

pub(super) fn require_root(missing: &[&str]) -> Result<()> {
    let user = crate::command::output(Command::new("id").arg("-u"))?;
    if user.trim() == "0" {
        return Ok(());
    }
    bail!(
        "{} missing, and installing needs root. Run:\n\n    sudo '{}' setup --system\n\nand then this task again",
        missing.join(", "),
        std::env::current_exe()?.display()
    );
}
