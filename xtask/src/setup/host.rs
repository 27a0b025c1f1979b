//! The Debian release that this machine runs.

use anyhow::{Result, bail};

use super::sources::{CODENAME, STABLE};

/// A release that the set-up knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Host {
    /// QEMU 10.0 is in its backports, 7.2 its own.
    Debian12,
    /// QEMU 10.0 is its own; what is older comes from Debian 12's archive.
    Debian13,
}

impl Host {
    /// Reads `/etc/os-release`; the error names what is `missing`.
    pub(super) fn detect(missing: &[&str]) -> Result<Self> {
        Self::of(&std::fs::read_to_string("/etc/os-release").unwrap_or_default(), missing)
    }

    fn of(release: &str, missing: &[&str]) -> Result<Self> {
        let codename = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
        match codename.unwrap_or("unknown") {
            CODENAME => Ok(Self::Debian12),
            STABLE => Ok(Self::Debian13),
            other => bail!(
                "{} missing, and this machine is `{other}`: the set-up knows Debian 12 ({CODENAME}) and 13 ({STABLE}); \
                 use such a machine or container",
                missing.join(", ")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_known_by_their_codenames() {
        let of = |name: &str| Host::of(&format!("ID=debian\nVERSION_CODENAME={name}\n"), &["xz-utils"]);
        assert_eq!(of(CODENAME).unwrap(), Host::Debian12);
        assert_eq!(of(STABLE).unwrap(), Host::Debian13);
        let error = of("noble").unwrap_err().to_string();
        assert!(error.starts_with("xz-utils missing, and this machine is `noble`"), "{error}");
    }
}
