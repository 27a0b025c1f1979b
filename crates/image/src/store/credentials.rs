//! Keys and region of a profile in AWS's shared files. `object_store` reads the environment and instance
//! metadata itself.
//!
//! Supports only static keys and regions, not roles or single sign-on; for these, export their keys.

use std::path::PathBuf;

use super::{Error, Result};

/// Maximum length of such a file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Settings of a profile.
#[derive(Default, PartialEq, Eq)]
pub(super) struct Profile {
    pub(super) key_id: Option<String>,
    pub(super) secret: Option<String>,
    pub(super) token: Option<String>,
    pub(super) region: Option<String>,
}

/// Keys must not appear in logs.
impl std::fmt::Debug for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Profile").field("has_keys", &self.secret.is_some()).finish_non_exhaustive()
    }
}

impl Profile {
    /// Loads the profile that the environment selects, from the files that it names.
    pub(super) fn load() -> Result<Self> {
        let name = ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"].iter().find_map(|name| std::env::var(name).ok());
        let name = name.unwrap_or_else(|| "default".into());
        let mut profile = Self::default();
        for (variable, file) in
            [("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")]
        {
            if let Some(path) = file_path(variable, file) {
                profile.read(&path, &name)?;
            }
        }
        Ok(profile)
    }

    fn read(&mut self, path: &PathBuf, name: &str) -> Result<()> {
        let bad = |why: String| Error::Credentials { path: path.display().to_string(), why };
        let length = match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            _ => return Ok(()),
        };
        if length > FILE_BYTES_MAX {
            return Err(bad(format!("{length} bytes, at most {FILE_BYTES_MAX} are allowed")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| bad(error.kind().to_string()))?;
        self.merge(&text, name);
        Ok(())
    }

    /// Existing settings are kept.
    fn merge(&mut self, text: &str, name: &str) {
        let mut is_ours = false;
        for line in text.lines().map(str::trim) {
            if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                let section = section.trim();
                is_ours = section.strip_prefix("profile ").unwrap_or(section).trim() == name;
            } else if let (true, Some((key, value))) = (is_ours, line.split_once('=')) {
                let field = match key.trim() {
                    "aws_access_key_id" => &mut self.key_id,
                    "aws_secret_access_key" => &mut self.secret,
                    "aws_session_token" => &mut self.token,
                    "region" => &mut self.region,
                    _ => continue,
                };
                field.get_or_insert_with(|| value.trim().to_owned());
            }
        }
    }
}

fn file_path(variable: &str, file: &str) -> Option<PathBuf> {
    match std::env::var_os(variable) {
        Some(path) => Some(path.into()),
        None => Some(PathBuf::from(std::env::var_os("HOME")?).join(".aws").join(file)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_found_in_both_files() {
        let mut profile = Profile::default();
        profile.merge(
            "[other]\naws_access_key_id=X\n[lab]\n aws_access_key_id = A\n# c\n aws_secret_access_key=B=\n",
            "lab",
        );
        profile.merge("[profile lab]\nregion = eu-central-1\naws_access_key_id = late\n", "lab");
        let found = (profile.key_id.as_deref(), profile.secret.as_deref(), profile.region.as_deref());
        assert_eq!(found, (Some("A"), Some("B="), Some("eu-central-1")));
        assert!(!format!("{profile:?}").contains("B="));
    }
}
