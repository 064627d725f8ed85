{{/* The parts that pods and containers of rlctl have in common. */}}

{{/* Settings of a pod. (dict "root" $ "component" $coordinator) */}}
{{- define "rlctl.pod" -}}
serviceAccountName: {{ include "rlctl.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.podSecurityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .component.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .component.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Metadata of a pod. (dict "root" $ "component" $coordinator "labels" LABELS) */}}
{{- define "rlctl.podMetadata" -}}
labels:
  {{- .labels | nindent 2 }}
  {{- with .component.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .component.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables of an rlctl process. They also hold for `kubectl exec`. (dict "root" $ "certificate" "tls") */}}
{{- define "rlctl.env" -}}
{{- $values := .root.Values -}}
- {name: HOME, value: /tmp}
- {name: USER, value: rlctl}  # libraries ask for the name of the user, and the image has none
- {name: RLCTL_LOG_FORMAT, value: {{ $values.log.format }}}
{{- if $values.token.secret }}
- {name: RLCTL_TOKEN_FILE, value: /etc/rlctl/token/token}
{{- end }}
{{- if $values.access.secret }}
- {name: RLCTL_ACCESS_FILE, value: /etc/rlctl/access/access.json}
{{- end }}
{{- if $values.tls.enabled }}
- {name: RLCTL_TLS_CA, value: /etc/rlctl/tls/ca.crt}
- {name: RLCTL_TLS_CERT, value: /etc/rlctl/tls/{{ .certificate }}.crt}
- {name: RLCTL_TLS_KEY, value: /etc/rlctl/tls/{{ .certificate }}.key}
{{- end }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Mounts of an rlctl process. Secrets are directories, so that their changes arrive without a restart. */}}
{{- define "rlctl.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.token.secret }}
- {name: token, mountPath: /etc/rlctl/token, readOnly: true}
{{- end }}
{{- if .Values.access.secret }}
- {name: access, mountPath: /etc/rlctl/access, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/rlctl/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volumes of these mounts, but for tls. */}}
{{- define "rlctl.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- with .Values.token }}
{{- if .secret }}
- {name: token, secret: {secretName: {{ .secret }}, defaultMode: 0440, items: [{key: {{ .key }}, path: token}]}}
{{- end }}
{{- end }}
{{- with .Values.access }}
{{- if .secret }}
- {name: access, secret: {secretName: {{ .secret }}, defaultMode: 0440, items: [{key: {{ .key }}, path: access.json}]}}
{{- end }}
{{- end }}
{{- end -}}
