{{- /* The labels of an object: kproxy's own, and maps of others, the first of which win. */ -}}
{{- define "kproxy.labels" -}}
{{- $labels := dict "k8s-app" "kproxy" }}
{{- range . }}
{{- $labels = merge $labels . }}
{{- end }}
{{- toYaml $labels }}
{{- end }}

{{- define "kproxy.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default (printf "%s%s" ($.Chart.AppVersion | replace "+" "-") (ternary "-ebpf" "" $.Values.ebpf)) }}
{{- end }}
{{- end }}
{{- end }}
